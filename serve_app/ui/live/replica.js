/** One replica: its slots, figures and step times. */
import { StepCurve } from "./chart.js";
import { h, setText, tiles } from "../common/dom.js";
import { count, duration } from "../common/why.js";

const PARTS = ["cached", "prompt", "generated", "missing"];
const LEAST_SCALE = 64;

/** Tokens in the caches, and how many there may be. @param {any[]} replicas */
export function keptTokens(replicas) {
  let used = 0;
  let cells = 0;
  for (const one of replicas) {
    cells += one.n_slots * one.n_ctx_slot;
    for (const slot of Object.values(one.slots)) used += slot[1] + slot[2] + slot[3];
  }
  return { used, cells };
}

/** Numbers as ranges, `0-3, 8`. @param {number[]} numbers */
function ranges(numbers) {
  const found = /** @type {[number, number][]} */ ([]);
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else found.push([n, n]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

/** A stage's layers, memory, and how it spends its time. @param {any} stage */
function part(stage) {
  const layers = `layers ${stage.first_layer + 1}-${stage.first_layer + stage.n_layers}`;
  const mib = Math.round((stage.weights_bytes + stage.cache_bytes) / 2 ** 20);
  const [computing, sending] = [stage.computing, stage.sending].map((share) => Math.round(100 * share));
  const waiting = Math.max(0, 100 - computing - sending);
  return ` · stage ${stage.stage + 1} of ${stage.n_stages}: ${layers}, ${mib.toLocaleString("en")} MiB; ${computing}% computing, ${waiting}% waiting, ${sending}% sending`;
}

export class ReplicaCard {
  #where = h("p", { className: "fine" });
  #badge = h("span", { className: "badge" });
  #figures = h("dl", { className: "tiles small" });
  #brief = h("p", { className: "fine brief" });
  #slots = h("div", { className: "slots", role: "img" });
  #scaleNote = h("p", { className: "fine scale" });
  #curve = new StepCurve();
  #rows = h("tbody");
  #more;
  #scale = LEAST_SCALE;

  /** @param {string} id @param {boolean} open */
  constructor(id, open) {
    const head = h("tr", {}, ...["Slot", "State", "Cached", "Prefilled", "Generated", "Left", "Request"].map((one) => h("th", { textContent: one, scope: "col" })));
    const table = h("table", {}, h("caption", { className: "unseen", textContent: "Slots" }), h("thead", {}, head), this.#rows);
    this.#more = h(
      "details",
      { open },
      h("summary", { textContent: "Step times and slots" }),
      h("div", { className: "more" }, this.#curve.element, h("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Slots of ${id}` }, table)),
    );
    this.element = h(
      "article",
      { className: "replica", "aria-label": `Replica ${id}` },
      h("header", {}, h("h3", { textContent: id }), this.#badge, this.#where),
      this.#slots,
      this.#scaleNote,
      this.#brief,
      this.#figures,
      this.#more,
    );
    this.#more.ontoggle = () => this.#last && this.show(this.#last);
  }

  /** @type {any} */
  #last = null;

  /** @param {any} replica */
  show(replica) {
    this.#last = replica;
    const cores = replica.cores ? `core${replica.cores.length === 1 ? "" : "s"} ${ranges(replica.cores)}` : `${count(replica.threads, "thread")}, not pinned`;
    const numa = replica.numa_node == null ? "" : `, NUMA node ${replica.numa_node}`;
    setText(this.#where, `node ${replica.node.slice(0, 8)} · ${cores}${numa}${replica.stage ? part(replica.stage) : ""}`);
    setText(this.#badge, replica.state === "up" ? "" : replica.state === "silent" ? "no answer" : replica.state);
    this.element.dataset.state = replica.state;
    this.#showLanes(replica);
    this.#showFigures(replica);
    if (this.#more.open) this.#showMore(replica);
  }

  /** @param {any} replica */
  #showLanes(replica) {
    const slots = Object.values(replica.slots);
    const longest = Math.max(...slots.map((one) => one[1] + one[2] + one[3] + one[4]));
    while (this.#scale < longest) this.#scale *= 2;
    const scale = Math.min(this.#scale, replica.n_ctx_slot);
    while (this.#slots.children.length < slots.length) this.#slots.append(slot());
    slots.forEach((one, i) => {
      const element = this.#slots.children[i];
      if (element.dataset.state !== one[0]) element.dataset.state = one[0];
      PARTS.forEach((_, j) => {
        const width = `${((100 * one[j + 1]) / scale).toFixed(2)}%`;
        if (element.children[j].style.width !== width) element.children[j].style.width = width;
      });
    });
    const busy = `${replica.running} of ${replica.n_slots} slots busy`;
    this.#slots.setAttribute("aria-label", busy);
    setText(this.#scaleNote, `${busy}; a slot's width is ${scale.toLocaleString("en")} of ${replica.n_ctx_slot.toLocaleString("en")} tokens`);
  }

  /** @param {any} replica */
  #showFigures(replica) {
    const { used, cells } = keptTokens([replica]);
    setText(this.#brief, `${replica.running} of ${replica.n_slots} busy, ${replica.waiting} waiting · ${replica.generated_per_s.toFixed(0)} tokens/s`);
    tiles(this.#figures, [
      ["Waiting", String(replica.waiting), replica.wait_s ? `next ${duration(1000 * replica.wait_s)}` : "a slot is free"],
      ["Tokens/s", replica.generated_per_s.toFixed(0), `prompts ${replica.prompt_per_s.toFixed(0)}`],
      ["First token", duration(replica.ttft[0]), `p95 ${duration(replica.ttft[1])}`],
      ["Between", duration(replica.itl[0]), `p95 ${duration(replica.itl[1])}`],
      ["Cores", `${(100 * replica.turns[0]).toFixed(0)}%`, `of the time; waits ${(100 * replica.turns[1]).toFixed(0)}%`],
      ["KV cache", `${((100 * used) / cells).toFixed(0)}%`, `stored ${replica.stored_mib} MiB`],
      ["Hits", replica.hits == null ? "–" : `${(100 * replica.hits).toFixed(0)}%`, "of prompts"],
    ]);
  }

  /** @param {any} replica */
  #showMore(replica) {
    this.#curve.show(replica.curve ?? {}, replica.point ?? null, replica.n_slots);
    const slots = Object.entries(replica.slots);
    while (this.#rows.children.length < slots.length) {
      this.#rows.append(h("tr", {}, h("th", { scope: "row" }), ...Array.from({ length: 6 }, () => h("td"))));
    }
    slots.forEach(([id, values], i) => {
      const cells = this.#rows.children[i].children;
      [id, ...values, replica.requests[id]].forEach((value, j) => setText(cells[j], value == null ? "" : String(value)));
    });
  }
}

function slot() {
  return h("div", { className: "slot" }, ...PARTS.map((part) => h("i", { className: part })));
}
