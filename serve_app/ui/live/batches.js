/** The batches of whoever looks: how far they are, how fast, and a button to cancel. */
import { ask, askJson } from "../common/api.js";
import { announce, byId, h, setText } from "../common/dom.js";
import { duration } from "../common/why.js";

const EVERY_MS = 2000;
const SHOWN = 20;
const ACTIVE = ["validating", "in_progress", "finalizing", "cancelling"];

/** A batch's row. It keeps what it saw, to tell the rate. */
class BatchRow {
  #name = h("td", { className: "name" });
  #status = h("td");
  #bar = h("progress", { max: 1, value: 0 });
  #counts = h("span", { className: "fine" });
  #rate = h("td", { className: "fine" });
  #cancel = h("button", { type: "button", className: "quiet", textContent: "Cancel" });
  /** @type {{at: number, done: number} | null} */
  #before = null;

  /** @param {string} id @param {(id: string) => void} cancel */
  constructor(id, cancel) {
    this.element = h("tr", {}, this.#name, this.#status, h("td", {}, this.#bar, this.#counts), this.#rate, h("td", {}, this.#cancel));
    this.#bar.setAttribute("aria-label", `Lines of ${id} that are done`);
    this.#cancel.setAttribute("aria-label", `Cancel ${id}`);
    this.#cancel.onclick = () => {
      this.#cancel.disabled = true;
      cancel(id);
    };
  }

  /** @param {any} batch */
  show(batch) {
    const { total, completed, failed } = batch.request_counts;
    const done = completed + failed;
    const active = ACTIVE.includes(batch.status);
    setText(this.#name, `${batch.id} (${batch.endpoint})`);
    setText(this.#status, batch.status.replace("_", " "));
    this.#bar.max = Math.max(1, total);
    this.#bar.value = done;
    setText(this.#counts, ` ${done} of ${total} lines${failed ? `, ${failed} failed` : ""}`);
    setText(this.#rate, active ? this.#told(done, total) : "");
    this.#cancel.hidden = !active || batch.status === "cancelling";
  }

  /** Lines a second since it was seen first, and the time that is left. @param {number} done @param {number} total */
  #told(done, total) {
    const at = performance.now();
    this.#before ??= { at, done };
    const perMs = (done - this.#before.done) / (at - this.#before.at || 1);
    return perMs > 0 ? `${(1000 * perMs).toFixed(1)} lines/s, ${left((total - done) / perMs)} left` : "";
  }
}

/** @param {number} ms */
function left(ms) {
  const minutes = ms / 60_000;
  if (minutes < 2) return duration(ms);
  return minutes < 120 ? `${Math.round(minutes)} min` : `${Math.round(minutes / 60)} h`;
}

export class Batches {
  /** @type {Map<string, BatchRow>} */
  #rows = new Map();
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #timer;

  /** Ask now and then, until `stop`. */
  start() {
    if (this.#timer !== undefined) return;
    this.#timer = setInterval(() => this.#look(), EVERY_MS);
    this.#look();
  }

  stop() {
    clearInterval(this.#timer);
    this.#timer = undefined;
  }

  async #look() {
    try {
      this.#show((await askJson(`v1/batches?limit=${SHOWN}`)).data);
    } catch {
      return; // it is asked again
    }
  }

  /** @param {any[]} batches */
  #show(batches) {
    byId("batches").hidden = !batches.length;
    const ids = batches.map((one) => one.id);
    for (const [id, row] of this.#rows) {
      if (ids.includes(id)) continue;
      row.element.remove();
      this.#rows.delete(id);
    }
    const isNew = ids.some((id) => !this.#rows.has(id));
    for (const batch of batches) {
      const row = this.#rows.get(batch.id) ?? new BatchRow(batch.id, (id) => this.#cancel(id));
      this.#rows.set(batch.id, row);
      row.show(batch);
    }
    if (isNew) byId("batch-rows").replaceChildren(...ids.map((id) => this.#rows.get(id)?.element));
  }

  /** @param {string} id */
  async #cancel(id) {
    try {
      await ask(`v1/batches/${id}/cancel`, { body: {} });
      announce(`${id} is cancelled.`);
    } catch (error) {
      announce(error instanceof Error ? error.message : String(error));
    }
    this.#look();
  }
}
