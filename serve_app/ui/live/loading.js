/** A button for operators: it loads a model that is loaded on demand, and unloads it. */
import { ask } from "../common/api.js";
import { announce, byId, setText } from "../common/dom.js";

export class LoadButton {
  #button = byId("load-button");
  #model = "";
  #loaded = false;
  /** @type {Set<string>} */
  #busy = new Set();

  constructor() {
    this.#button.onclick = () => this.#turn(this.#model, this.#loaded);
  }

  /** @param {string} model @param {boolean} [loaded]  nothing if it is always loaded, or not this viewer's to decide */
  show(model, loaded) {
    this.#model = model;
    this.#loaded = loaded ?? false;
    this.#button.hidden = loaded === undefined;
    this.#button.disabled = this.#busy.has(model);
    setText(this.#button, this.#busy.has(model) ? "Loading" : loaded ? "Unload" : "Load");
  }

  /** @param {string} model @param {boolean} loaded */
  async #turn(model, loaded) {
    if (!loaded) this.#busy.add(model);
    this.show(model, loaded);
    setText(byId("load-error"), "");
    try {
      await ask(`models/${loaded ? "unload" : "load"}`, { body: { model } });
      announce(loaded ? `${model} is unloaded as soon as nobody uses it.` : `${model} is loaded.`);
    } catch (error) {
      setText(byId("load-error"), error instanceof Error ? error.message : String(error));
    }
    this.#busy.delete(model);
  }
}
