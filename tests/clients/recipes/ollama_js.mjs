// The `ollama` package for JavaScript.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const host = process.argv[2];

const client = new Ollama({ host });
const options = { temperature: 0 };
const messages = [{ role: "user", content: "What is the capital of Italy?" }];
const said = "The capital of Italy is Rome.";

const whole = await client.chat({ model: "demo", messages, options });
assert.equal(whole.message.content, said);
assert.equal(whole.done_reason, "stop");

let text = "";
for await (const part of await client.chat({ model: "demo", messages, options, stream: true })) {
  text += part.message.content;
}
assert.equal(text, said);

const generated = await client.generate({ model: "demo", prompt: messages[0].content, options });
assert.equal(generated.response, said);
assert.ok(generated.context.length > 10);

const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
const weather = { name: "get_weather", description: "Get the weather of a city", parameters };
const asked = await client.chat({
  model: "demo",
  messages: [{ role: "user", content: "What is the weather in Lisbon?" }],
  tools: [{ type: "function", function: weather }],
  options,
});
const [call] = asked.message.tool_calls;
assert.deepEqual([call.function.name, call.function.arguments], ["get_weather", { city: "Lisbon" }]);

const { models } = await client.list();
assert.deepEqual(models.map((model) => model.name), ["demo:latest", "small:latest", "ranker:latest"]);
const shown = await client.show({ model: "demo" });
assert.deepEqual(shown.capabilities, ["completion", "tools", "vision"]);
const vectors = await client.embed({ model: "demo", input: ["A fox.", "A brave fox."] });
assert.deepEqual(vectors.embeddings.map((vector) => vector.length), [256, 256]);
assert.ok((await client.version()).version);
await assert.rejects(client.chat({ model: "none", messages }), /model 'none' not found/);
await assert.rejects(client.delete({ model: "demo" }), /configuration/);

// A stream that waits for long is read as any other; once a second, the server sends a part without text.
const blocking = new AbortController();
const endless = { model: "small", prompt: "x", max_tokens: 200000, context_shift: true, stream: true };
const first = await fetch(`${host}/v1/completions`, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(endless),
  signal: blocking.signal,
});
await first.body.getReader().read();
const waiting = await client.chat({ model: "small", messages, options: { num_predict: 4 }, stream: true });
const parts = [];
for await (const part of waiting) {
  parts.push(part);
  if (parts.length === 2) blocking.abort();
}
const silent = parts.slice(0, 2).map((part) => [part.message.content, part.done]);
assert.deepEqual(silent, [["", false], ["", false]]);
assert.equal(parts.at(-1).done_reason, "length");
