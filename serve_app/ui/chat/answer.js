/** One message on the page; the same for chats and comparisons. */
import { copyButton, h, onceAFrame, setText } from "../common/dom.js";
import { Markdown } from "../common/markdown.js";
import { count, duration, why } from "../common/why.js";

/** @typedef {import("../common/store.js").Message} Message */

const ENDS = /** @type {Record<string, string>} */ ({
  length: "cut off: max_tokens, or the context is full",
  stopped: "stopped",
  error: "failed",
});

/** What the user said. @param {Message} message */
export function question(message) {
  const label = message.role === "tool" ? "Tool result" : "You";
  const pictures = (message.pictures ?? []).map((src, i) => h("li", {}, h("img", { src, alt: `Picture ${i + 1}` })));
  return h(
    "article",
    { className: `message ${message.role}`, "aria-label": label },
    h("p", { className: "who", textContent: label }),
    pictures.length ? h("ul", { className: "pictures" }, ...pictures) : null,
    message.content ? h("div", { className: "plain", textContent: message.content }) : null,
  );
}

/** An answer, which may still grow: `update` after each change, `finish` at its end. */
export class AnswerView {
  #message;
  #markdown;
  #text = h("div", { className: "markdown" });
  #reasoning = h("div", { className: "plain" });
  #thinking = h("details", { className: "fold" }, h("summary", { textContent: "Reasoning" }), this.#reasoning);
  #calls = h("div", { className: "calls" });
  #foot = h("footer");
  #actions;

  /**
   * @param {Message} message
   * @param {{label?: string, actions?: () => Node[], onResults?: (results: string[]) => void}} [options]
   */
  constructor(message, options = {}) {
    this.#message = message;
    this.#markdown = new Markdown(this.#text);
    this.#actions = options;
    const label = options.label || message.meta?.model || "Answer";
    this.element = h(
      "article",
      { className: "message assistant", "aria-label": `Answer: ${label}` },
      h("p", { className: "who", textContent: label }),
      this.#thinking,
      this.#text,
      this.#calls,
      this.#foot,
    );
    this.#thinking.hidden = true;
    this.update = onceAFrame(() => this.#show());
  }

  /** Show it while it is written. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.element.classList.add("busy");
    return this;
  }

  #show() {
    const { content, reasoning, tool_calls } = this.#message;
    this.#thinking.hidden = !reasoning;
    if (reasoning) setText(this.#reasoning, reasoning);
    this.#markdown.show(content);
    const calls = tool_calls ?? [];
    this.#calls.lastElementChild?.remove(); // it may have grown
    while (this.#calls.children.length < calls.length) {
      this.#calls.append(call(calls[this.#calls.children.length]));
    }
  }

  /** Show all of it, and what it took. */
  finish() {
    this.#show();
    this.element.removeAttribute("aria-busy");
    this.element.classList.remove("busy");
    const meta = this.#message.meta ?? {};
    const facts = h("ul", { className: "facts", "aria-label": "What it took" }, ...factsOf(meta));
    const buttons = h("div", { className: "actions" }, copyButton(() => this.#message.content));
    buttons.append(...(this.#actions.actions?.() ?? []));
    this.#foot.replaceChildren(facts, buttons);
    if (meta.error) this.#foot.prepend(h("p", { className: "error", role: "alert", textContent: meta.error }));
    if (meta.ignored) this.#foot.prepend(h("p", { role: "note", textContent: `The server ignored these parameters: ${meta.ignored}` }));
    if (meta.id) this.#foot.append(why(meta.id));
    if (this.#message.tool_calls?.length && this.#actions.onResults) this.#askForResults();
    return this;
  }

  #askForResults() {
    const fields = (this.#message.tool_calls ?? []).map((one) =>
      h("textarea", { rows: 1, "aria-label": `Result of ${one.function.name}`, placeholder: `Result of ${one.function.name}` }),
    );
    const form = h("form", { className: "results" }, ...fields, h("button", { textContent: "Send results" }));
    form.onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      form.remove();
      this.#actions.onResults?.(fields.map((field) => field.value));
    };
    this.#foot.append(form);
  }
}

/** @param {any} one */
function call(one) {
  let given = one.function.arguments;
  try {
    given = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // shown as it is
  }
  const title = h("summary", {}, "Calls ", h("code", { textContent: one.function.name }));
  return h("details", { className: "fold" }, title, h("pre", { tabIndex: 0 }, h("code", { textContent: given })));
}

/** @param {import("../common/store.js").Meta} meta */
function factsOf(meta) {
  const { usage, timings, finish } = meta;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const facts = [
    usage && count(usage.completion_tokens, "token"),
    usage && `${count(usage.prompt_tokens, "prompt token")}${cached ? `, ${cached} cached` : ""}`,
    meta.ttft_ms != null && `first token after ${duration(meta.ttft_ms)}`,
    timings && timings.predicted_n > 1 && `${timings.predicted_per_second.toFixed(1)} tokens/s`,
    finish && ENDS[finish],
  ];
  return facts.filter(Boolean).map((text) => h("li", { textContent: text }));
}
