/** The form for a system prompt and sampling settings. */
import { h } from "./dom.js";

/** @typedef {import("./store.js").Settings} Settings */

const NUMBERS = /** @type {[keyof Settings, string, Record<string, string>][]} */ ([
  ["temperature", "Temperature", { min: "0", max: "5", step: "any", placeholder: "0.8" }],
  ["top_p", "Top p", { min: "0", max: "1", step: "any", placeholder: "0.95" }],
  ["top_k", "Top k", { min: "0", step: "1", placeholder: "40" }],
  ["min_p", "Min p", { min: "0", max: "1", step: "any", placeholder: "0.05" }],
  ["max_tokens", "Max tokens", { min: "1", step: "1", placeholder: "no limit" }],
  ["seed", "Seed", { min: "0", step: "1", placeholder: "any" }],
]);
let nForms = 0;

/**
 * A form that writes into `settings`.
 * @param {Settings} settings @param {() => void} changed
 * @returns {HTMLElement}
 */
export function settingsForm(settings, changed) {
  const prefix = `set${++nForms}-`;
  /** @param {keyof Settings} name @param {string} label @param {any} input */
  const field = (name, label, input) => {
    input.id = prefix + name;
    input.name = name;
    input.value = settings[name];
    input.oninput = () => {
      settings[name] = input.value;
      changed();
    };
    return h("div", { className: `field ${name}` }, h("label", { for: input.id, textContent: label }), input);
  };
  const numbers = NUMBERS.map(([name, label, limits]) =>
    field(name, label, h("input", { type: "number", inputMode: "decimal", ...limits })),
  );
  return h(
    "div",
    { className: "settings-form" },
    field("system", "System prompt", h("textarea", { rows: 2 })),
    h("div", { className: "numbers" }, ...numbers),
    field("more", "More parameters, as JSON", h("textarea", { rows: 2, spellcheck: false, placeholder: '{"tools": […], "stop": ["END"]}' })),
  );
}

/**
 * The models of /v1/models that write text.
 * @template {{id: string, capabilities?: string[]}} T
 * @param {T[]} models
 * @returns {T[]}
 */
export function writers(models) {
  return models.filter((one) => !["embeddings", "rerank", "classify"].some((name) => one.capabilities?.includes(name)));
}

/** @param {any} select @param {{id: string}[]} models @param {string} chosen */
export function fillModels(select, models, chosen) {
  const known = models.some((one) => one.id === chosen);
  select.replaceChildren(...models.map((one) => h("option", { value: one.id, textContent: one.id })));
  select.value = known ? chosen : models[0]?.id ?? "";
  return select.value;
}
