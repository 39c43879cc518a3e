/** From a conversation to the request that continues it, and from its stream to an answer. */
import { events } from "../common/api.js";

/** @typedef {import("../common/store.js").Message} Message */
/** @typedef {import("../common/store.js").Settings} Settings */

const NUMBERS = /** @type {const} */ (["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]);

/**
 * The body for `/v1/chat/completions`. The server decides fields that are not set.
 * @param {string} model @param {Settings} settings @param {Message[]} messages
 * @returns {any}
 * @throws {Error} with a sentence if `settings.more` is not a JSON object
 */
export function bodyOf(model, settings, messages) {
  const said = messages.filter((one) => one.content || one.pictures?.length || one.tool_calls?.length).map(toApi);
  const body = /** @type {any} */ ({
    ...(model ? { model } : {}), // the server has a default, too
    messages: settings.system ? [{ role: "system", content: settings.system }, ...said] : said,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
  });
  for (const name of NUMBERS) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return { ...body, ...more(settings.more) };
}

/** @param {string} text @returns {object} */
function more(text) {
  if (!text.trim()) return {};
  try {
    const found = JSON.parse(text);
    if (found && typeof found === "object" && !Array.isArray(found)) return found;
  } catch {
    // said below
  }
  throw new Error("“More parameters” must be a JSON object, such as {\"stop\": [\"END\"]}.");
}

/** @param {Message} message */
function toApi({ role, content, pictures, reasoning, tool_calls, tool_call_id }) {
  return {
    role,
    content: pictures?.length ? [...pictures.map(asPart), { type: "text", text: content }] : content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(tool_calls?.length ? { tool_calls } : {}),
    ...(tool_call_id ? { tool_call_id } : {}),
  };
}

/** @param {string} url */
const asPart = (url) => ({ type: "image_url", image_url: { url } });

/**
 * Read an answer into `message`, to its end, whatever that is: `message.meta.finish` says it (`stop`, `length`,
 * `tool_calls`, `stopped`, `error`).
 * @param {any} body @param {Message} message @param {AbortSignal} signal @param {() => void} changed
 */
export async function answer(body, message, signal, changed) {
  const began = performance.now();
  const meta = (message.meta = /** @type {import("../common/store.js").Meta} */ ({ model: body.model }));
  try {
    const onHeaders = (/** @type {Headers} */ headers) => void (meta.ignored = headers.get("x-corral-ignored") ?? undefined);
    for await (const event of events("v1/chat/completions", { body, signal, onHeaders })) {
      if (event.error) throw new Error(event.error.message);
      meta.id = event.id;
      meta.model = event.model;
      if (event.usage) meta.usage = event.usage;
      if (event.timings) meta.timings = event.timings;
      const [choice] = event.choices;
      if (!choice) continue;
      if (take(message, choice.delta)) meta.ttft_ms ??= performance.now() - began;
      if (choice.finish_reason) meta.finish = choice.finish_reason;
      changed();
    }
    meta.finish ??= "error"; // the connection broke off
    if (meta.finish === "error") meta.error = "The answer was cut off.";
  } catch (error) {
    meta.finish = signal.aborted ? "stopped" : "error";
    if (!signal.aborted) meta.error = error instanceof Error ? error.message : String(error);
  } finally {
    meta.total_ms = performance.now() - began;
    changed();
  }
}

/** @param {Message} message @param {any} delta @returns {boolean}  whether there was anything in it */
function take(message, delta) {
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const { index, ...call } of delta.tool_calls ?? []) {
    const known = (message.tool_calls ??= [])[index];
    if (known) known.function.arguments += call.function.arguments;
    else message.tool_calls[index] = call;
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

/**
 * The command that sends this request again.
 * @param {any} body @param {boolean} withKey
 */
export function curl(body, withKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl --no-buffer ${new URL("v1/chat/completions", document.baseURI)}`,
    ...(withKey ? ['  --header "Authorization: Bearer $CORRAL_API_KEY"'] : []),
    `  -H 'Content-Type: application/json' -d '${quoted}'`,
  ].join(" \\\n");
}
