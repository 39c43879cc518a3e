/** Live metrics: one stream from the server, shown as it comes. */
import { events, NoKeyError } from "../common/api.js";
import { Timeline } from "./chart.js";
import { announce, byId, h, onceAFrame, setText, tiles } from "../common/dom.js";
import { ReplicaCard, keptTokens } from "./replica.js";
import { Batches } from "./batches.js";
import { LoadButton } from "./loading.js";
import { fillModels } from "../common/settings.js";
import { count, duration } from "../common/why.js";

const KEPT_S = 600;
const FEW = 8;
/** @type {Record<string, string>} */
const TOLD = {
  starting: "A replica is starting",
  came: "A replica started",
  draining: "A replica is draining",
  gone: "A replica ended",
  resumed: "A replica continues another one's requests",
  preempted: "The cache was full: requests lost their slots",
};

/**
 * Carry out a JSON merge patch (RFC 7396).
 * @param {any} target @param {any} patch
 */
function merge(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = target && typeof target === "object" && !Array.isArray(target) ? target : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key];
    else result[key] = merge(result[key], value);
  }
  return result;
}

export class LivePage {
  /** @type {any} */
  #board = {};
  /** @type {Record<string, {at: number, generated: number, prompt: number}[]>} */
  #history = {};
  /** @type {AbortController | null} */
  #subscription = null;
  #visible = false;
  /** @type {Map<string, ReplicaCard>} */
  #cards = new Map();
  #timeline = new Timeline(byId("timeline"));
  #batches = new Batches();
  #loadButton = new LoadButton();
  #nTold = 0;
  #render = onceAFrame(() => this.#show());

  constructor() {
    byId("live-model").onchange = this.#render;
    document.addEventListener("visibilitychange", () => this.#turn());
    new ResizeObserver(this.#render).observe(byId("timeline"));
  }

  show() {
    this.#visible = true;
    this.#turn();
  }

  hide() {
    this.#visible = false;
    this.#turn();
  }

  /** Subscribe exactly while somebody can see it. */
  #turn() {
    const wanted = this.#visible && document.visibilityState === "visible";
    if (!wanted) {
      this.#subscription?.abort();
      this.#subscription = null;
      this.#batches.stop();
    } else if (!this.#subscription) {
      this.#subscription = new AbortController();
      this.#subscribe(this.#subscription.signal);
    }
  }

  /** @param {AbortSignal} signal */
  async #subscribe(signal) {
    while (!signal.aborted) {
      try {
        this.#board = {}; // the first event is all of it
        for await (const patch of events("v1/live", { signal })) {
          this.#board = merge(this.#board, patch);
          if (this.#board.takes_batches) this.#batches.start();
          this.#remember();
          this.#state("Live");
          this.#render();
        }
      } catch (error) {
        if (signal.aborted) return;
        this.#state(error instanceof Error ? error.message : String(error));
        if (error instanceof NoKeyError) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  /** @param {string} text */
  #state(text) {
    setText(byId("live-state"), text);
    byId("live-state").classList.toggle("on", text === "Live");
  }

  #remember() {
    const { at, replicas, models } = this.#board;
    for (const model of Object.keys(models)) {
      const own = Object.values(replicas).filter((/** @type {any} */ one) => one.model === model);
      const points = (this.#history[model] ??= []);
      points.push({ at, generated: sum(own, "generated_per_s"), prompt: sum(own, "prompt_per_s") });
      while (at - points[0].at > KEPT_S) points.shift();
    }
  }

  #show() {
    const { models, replicas, events: happened = {} } = this.#board;
    if (!models) return;
    const select = byId("live-model");
    const ids = Object.keys(models);
    if (ids.join() !== [...select.options].map((/** @type {any} */ one) => one.value).join()) {
      fillModels(select, ids.map((id) => ({ id })), select.value);
    }
    const model = select.value;
    const own = Object.entries(replicas).filter(([, one]) => /** @type {any} */ (one).model === model);
    const told = Object.values(happened).filter((/** @type {any} */ one) => one.model === model);
    this.#loadButton.show(model, this.#board.operates ? models[model].loaded : undefined);
    this.#showTiles(models[model], own.map(([, one]) => one));
    this.#timeline.show(this.#history[model] ?? [], told.map((one) => ({ ...one, text: sentence(one) })), KEPT_S);
    this.#showEvents(told);
    this.#showReplicas(own);
  }

  /** @param {any} model @param {any[]} replicas */
  #showTiles(model, replicas) {
    const waits = replicas.map((one) => one.wait_s);
    const { used, cells } = keptTokens(replicas);
    const starting = model.states?.STARTING ?? 0;
    const stopping = model.states?.STOPPING ?? 0;
    const hits = replicas.filter((one) => one.hits != null).map((one) => one.hits);
    tiles(byId("tiles"), [
      ["Replicas", String(replicas.length), [starting && `${starting} starting${downloads(model.fetching)}`, stopping && `${stopping} draining`].filter(Boolean).join(", ")],
      ["Slots busy", `${sum(replicas, "running")}`, `of ${sum(replicas, "n_slots")}`],
      ["Waiting", `${sum(replicas, "waiting")}`, waitNote(waits)],
      ["Tokens/s", sum(replicas, "generated_per_s").toFixed(0), `prompts ${sum(replicas, "prompt_per_s").toFixed(0)}`],
      ["First token", duration(model.ttft[0]), `p95 ${duration(model.ttft[1])}`],
      ["Inter-token latency", duration(model.itl[0]), `p95 ${duration(model.itl[1])}`],
      ["KV cache", `${((100 * used) / Math.max(1, cells)).toFixed(0)}%`, `${count(used, "token")}`],
      ["Prefix hits", hits.length ? `${((100 * hits.reduce((a, b) => a + b, 0)) / hits.length).toFixed(0)}%` : "–", "in the last minute"],
    ]);
  }

  /** @param {any[]} told */
  #showEvents(told) {
    const newest = told.at(-1)?.n ?? 0;
    if (newest === this.#nTold && byId("events").children.length) return;
    if (this.#nTold && newest > this.#nTold) announce(sentence(told.at(-1)));
    this.#nTold = newest;
    const items = told.slice(-50).reverse().map((one) => {
      const at = new Date(1000 * one.at);
      const time = h("time", { dateTime: at.toISOString(), textContent: at.toLocaleTimeString() });
      return h("li", { className: one.kind }, time, " ", sentence(one));
    });
    byId("events").replaceChildren(...(items.length ? items : [h("li", { textContent: "Nothing yet." })]));
  }

  /** @param {[string, any][]} own */
  #showReplicas(own) {
    const root = byId("replicas");
    const shown = new Set(own.map(([id]) => id));
    for (const [id, card] of this.#cards) {
      if (shown.has(id)) continue;
      card.element.remove();
      this.#cards.delete(id);
    }
    for (const [id, replica] of own) {
      let card = this.#cards.get(id);
      if (!card) {
        card = new ReplicaCard(id, own.length === 1);
        this.#cards.set(id, card);
        root.append(card.element);
      }
      card.show(replica);
    }
    root.classList.toggle("many", own.length > FEW);
    root.classList.toggle("single", own.length === 1);
  }
}

/** How far downloads are: of the last one to end, as all are needed. @param {Object<string, number>} [fetching] */
function downloads(fetching = {}) {
  const all = Object.values(fetching);
  if (!all.length) return "";
  return `: ${Math.floor(100 * Math.min(...all))}% downloaded`;
}

/** @param {any[]} replicas @param {string} name */
const sum = (replicas, name) => replicas.reduce((all, one) => all + one[name], 0);

/** How long the next request would wait where it is shortest. @param {number[]} waits  in seconds */
function waitNote(waits) {
  const least = Math.min(...waits);
  if (!waits.length) return "no replica";
  return least ? `the next waits ${duration(1000 * least)}` : "a slot is free";
}

/** @param {any} event */
function sentence({ kind, replica, count: n }) {
  const text = TOLD[kind] ?? kind;
  return replica ? `${text}: ${replica}` : n > 1 ? `${text} (${n})` : text;
}
