// The tool runner of `@anthropic-ai/sdk`: without a thread, it sends whole histories.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const sent = [];
const client = new Anthropic({
  baseURL: process.argv[2],
  apiKey: "none",
  fetch: (url, options) => {
    if (String(url).includes("/v1/messages")) sent.push(JSON.parse(options.body));
    return fetch(url, options);
  },
});
const tool = (name, description, answer) =>
  betaTool({
    name,
    description,
    inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    run: () => answer,
  });

const runner = client.beta.messages.toolRunner({
  model: "demo",
  max_tokens: 100,
  temperature: 0,
  tools: [tool("get_weather", "Get the weather of a city", "It is sunny.")],
  messages: [{ role: "user", content: "What is the weather in Lisbon?" }],
});
let last;
for await (const message of runner) {
  if (last === undefined) runner.addTools(tool("get_time", "Get the time in a city", "It is noon."));
  last = message;
}
assert.equal(last.stop_reason, "end_turn");
assert.ok(last.content[0].text);

const [refused, first, second] = sent;
assert.equal(sent.length, 3);
assert.deepEqual(refused.thread, { type: "create" });
assert.equal(first.thread ?? second.thread, undefined);
assert.deepEqual(second.messages.map((message) => message.role), ["user", "assistant", "user", "system"]);
assert.equal(second.messages[3].content[0].tool.definition.name, "get_time");
assert.deepEqual(second.tools, first.tools);
