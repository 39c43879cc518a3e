// The packages `openai` and `@anthropic-ai/sdk`: a used-up budget is an error at once, and not a sleep of weeks.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, ...keys] = process.argv.slice(2);
const chat = { model: "demo", messages: [{ role: "user", content: "Hello" }], max_tokens: 4 };
let asked = 0;

async function counting(address, options) {
  asked += 1;
  return fetch(address, options);
}

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: keys[0], fetch: counting });
const anthropic = new Anthropic({ baseURL: url, apiKey: keys[1], fetch: counting });
for (const [ask, kind] of [
  [() => openai.chat.completions.create(chat), OpenAI.RateLimitError],
  [() => anthropic.messages.create(chat), Anthropic.RateLimitError],
]) {
  await ask();
  asked = 0;
  await assert.rejects(ask, (error) => {
    assert.ok(error instanceof kind, String(error));
    assert.match(error.message, /has used up its/);
    assert.ok(Number(error.headers.get("retry-after")) > 60);
    assert.equal(error.headers.get("x-should-retry"), "false");
    return true;
  });
  assert.equal(asked, 1, "it was asked again");
}
