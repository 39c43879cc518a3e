// The AI SDK of Vercel (`ai` and `@ai-sdk/openai`): with a store, it refers to what it was answered.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

const sent = [];
const openai = createOpenAI({
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  fetch: (url, options) => {
    sent.push(JSON.parse(options.body));
    return fetch(url, options);
  },
});
const weather = tool({
  description: "Get the weather of a city",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: () => ({ temperature: 19, condition: "sunny" }),
});
const shared = { model: openai("demo"), temperature: 0, tools: { get_weather: weather }, stopWhen: isStepCount(3) };
const stream = async (options) => {
  const made = streamText(options);
  return { text: await made.text, steps: await made.steps, responseMessages: await made.responseMessages };
};
const kinds = (body) => body.input.map((item) => item.type ?? item.role);

for (const answer of [generateText, stream]) {
  sent.length = 0;
  const messages = [{ role: "user", content: "What is the weather in Lisbon?" }];
  const first = await answer({ ...shared, messages });
  assert.equal(first.text, "It is sunny in Lisbon, at 19 degrees.");
  messages.push(...first.responseMessages, { role: "user", content: "What is the weather in Oslo?" });
  const second = await answer({ ...shared, messages });
  assert.equal(second.text, "It is sunny in Oslo, at 19 degrees.");
  const calls = [...first.steps, ...second.steps].flatMap((step) => step.toolCalls);
  assert.deepEqual(calls.map((call) => call.input), [{ city: "Lisbon" }, { city: "Oslo" }]);
  const turn = ["user", "function_call", "function_call_output"];
  assert.deepEqual(kinds(sent.at(-1)), [...turn, "item_reference", ...turn]);

  messages.push(...second.responseMessages, { role: "user", content: "What is the capital of Italy?" });
  messages.find((message) => Array.isArray(message.content) && message.content[0].type === "text").content[0]
    .providerOptions.openai.itemId = "msg_1";
  await assert.rejects(generateText({ ...shared, messages }), (error) => {
    assert.deepEqual([error.statusCode, error.isRetryable], [404, false]);
    assert.match(error.message, /^Item with id 'msg_1' not found\./);
    return true;
  });
}
