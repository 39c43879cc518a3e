/** Usage by day and model: of one's own key, and for operators of all keys. */
import { askJson } from "../common/api.js";
import { byId, h, setText } from "../common/dom.js";
import { DayBars } from "../live/chart.js";

const DAYS = 30;
const DAY_S = 86_400;
const ALL = "All keys";

/** @param {number | null} value @param {number} [digits] */
const number = (value, digits = 0) => (value == null ? "not measured" : value.toLocaleString("en", { maximumFractionDigits: digits }));
/** @param {number} seconds */
const date = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 10);

export class UsagePage {
  /** @type {any[]} */
  #buckets = [];
  #bars = new DayBars(byId("usage-plot"));

  constructor() {
    byId("usage-key").onchange = () => this.#render();
    new ResizeObserver(() => this.#render()).observe(byId("usage-plot"));
  }

  async show() {
    const today = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
    const query = `start_time=${today - (DAYS - 1) * DAY_S}&bucket_width=1d&limit=${DAYS}`;
    try {
      const page = await askJson(`v1/usage?${query}&group_by=model&group_by=api_key_id`);
      this.#buckets = page.data;
      setText(byId("usage-state"), "");
    } catch (error) {
      this.#buckets = [];
      setText(byId("usage-state"), error instanceof Error ? error.message : String(error));
    }
    this.#fillKeys();
    this.#render();
  }

  hide() {}

  #fillKeys() {
    const select = byId("usage-key");
    const names = [...new Set(this.#buckets.flatMap((one) => one.results.map((/** @type {any} */ row) => row.api_key_id)))].sort();
    const chosen = names.includes(select.value) ? select.value : ALL;
    select.replaceChildren(...[ALL, ...names].map((name) => h("option", { value: name, textContent: name })));
    select.value = chosen;
    select.hidden = names.length < 2;
  }

  #render() {
    const key = byId("usage-key").value;
    const days = this.#buckets.map((bucket) => ({
      day: date(bucket.start_time),
      models: sums(bucket.results.filter((/** @type {any} */ row) => key === ALL || row.api_key_id === key)),
    }));
    this.#bars.show(days.map(({ day, models }) => ({ day, prompt: total(models, "input_tokens"), generated: total(models, "output_tokens") })));
    const rows = days.reverse().flatMap(({ day, models }) => models.map((one) => row(day, one)));
    const none = h("tr", {}, h("td", { colSpan: 9, textContent: `No requests in ${DAYS} days` }));
    byId("usage-rows").replaceChildren(...(rows.length ? rows : [none]));
  }
}

const COUNTS = ["num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens", "compute_s", "joules", "cost"];

/** The sums of each model, over keys. @param {any[]} results */
function sums(results) {
  /** @type {Map<string, any>} */
  const models = new Map();
  for (const one of results) {
    const sum = models.get(one.model) ?? { model: one.model };
    for (const name of COUNTS) sum[name] = one[name] == null ? sum[name] : (sum[name] ?? 0) + one[name];
    models.set(one.model, sum);
  }
  return [...models.values()];
}

/** @param {any[]} rows @param {string} name */
const total = (rows, name) => rows.reduce((sum, one) => sum + one[name], 0);

/** @param {string} day @param {any} one */
function row(day, one) {
  const cells = COUNTS.map((name) => h("td", { textContent: number(one[name], name === "cost" ? 6 : name === "compute_s" ? 1 : 0) }));
  return h("tr", {}, h("td", { textContent: day }), h("td", { className: "name", textContent: one.model }), ...cells);
}
