/** One prompt to two models, or to one with two settings. */
import * as api from "../common/api.js";
import { AnswerView } from "./answer.js";
import { growing, setSending } from "./chat.js";
import { announce, byId, h } from "../common/dom.js";
import { answer, bodyOf } from "./request.js";
import { fillModels, settingsForm, writers } from "../common/settings.js";
import * as store from "../common/store.js";

/** One of the two. */
class Side {
  /** @param {string} name */
  constructor(name) {
    this.name = name;
    this.settings = store.noSettings();
    this.select = h("select", { "aria-label": `Model ${name}` });
    this.out = h("div", { className: "out" });
    this.element = h(
      "section",
      { className: "one", "aria-label": `Side ${name}` },
      h("div", { className: "one-head" }, h("h3", { textContent: name }), this.select),
      h("details", { className: "fold" }, h("summary", { textContent: "Settings" }), settingsForm(this.settings, () => {})),
      this.out,
    );
  }

  /** @param {string} prompt @param {AbortSignal} signal */
  async run(prompt, signal) {
    const message = /** @type {store.Message} */ ({ role: "assistant", content: "" });
    try {
      const body = bodyOf(this.select.value, this.settings, [{ role: "user", content: prompt }]);
      const view = new AnswerView(message, { label: this.select.value }).begin();
      this.out.replaceChildren(view.element);
      await answer(body, message, signal, view.update);
      view.finish();
    } catch (error) {
      this.fail(error);
    }
  }

  /** @param {unknown} error */
  fail(error) {
    const textContent = error instanceof Error ? error.message : "";
    this.out.replaceChildren(h("p", { className: "error", role: "alert", textContent }));
  }
}

export class ComparePage {
  #sides = [new Side("A"), new Side("B")];
  /** @type {AbortController | null} */
  #running = null;
  #filled = false;

  constructor() {
    const field = byId("compare-question");
    byId("pair").append(...this.#sides.map((side) => side.element));
    growing(field, byId("compare-ask"));
    byId("compare-ask").onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      if (this.#running) this.#running.abort();
      else if (field.value.trim()) this.#run(field.value);
    };
  }

  async show() {
    byId("compare-question").focus();
    if (this.#filled) return;
    try {
      const models = writers((await api.askJson("v1/models")).data);
      this.#sides.forEach((side, i) => fillModels(side.select, models, models[i]?.id));
      this.#filled = true;
    } catch (error) {
      this.#sides[0].fail(error);
    }
  }

  hide() {}

  /** @param {string} prompt */
  async #run(prompt) {
    const running = (this.#running = new AbortController());
    setSending(byId("compare-send"), true);
    announce("Both answers begin.");
    await Promise.all(this.#sides.map((side) => side.run(prompt, running.signal)));
    this.#running = null;
    setSending(byId("compare-send"), false);
    announce("Both answers are complete.");
  }
}
