/** Why an answer took as long as it did, from `/v1/requests/{id}`. */
import { askJson } from "./api.js";
import { h } from "./dom.js";

/** @param {number | null | undefined} milliseconds */
export function duration(milliseconds) {
  if (milliseconds == null) return "–";
  if (milliseconds < 1) return "0 ms";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  return `${(milliseconds / 1000).toFixed(milliseconds < 10_000 ? 2 : 1)} s`;
}

/** @param {number} n @param {string} one */
export const count = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

/**
 * A line that opens to the explanation; asks the server when it is opened.
 * @param {string} id  of an answer
 */
export function why(id) {
  const body = h("div", { className: "why-body" });
  const details = h("details", { className: "why" }, h("summary", { textContent: "Where the time went" }), body);
  details.ontoggle = async () => {
    if (!details.open) return;
    try {
      const found = await askJson(`v1/requests/${encodeURIComponent(id)}`);
      body.replaceChildren(...found.sequences.map(explained));
      body.scrollIntoView({ block: "nearest" });
    } catch (error) {
      body.replaceChildren(h("p", { textContent: error instanceof Error ? error.message : String(error) }));
    }
  };
  return details;
}

/** @param {any} sequence */
function explained(sequence) {
  const spent = sequence.timings;
  const where = h(
    "p",
    { className: "fine" },
    `Replica ${sequence.replica_id} on node ${sequence.node_id.slice(0, 8)}. While it is paused, the engine computes other requests.`,
  );
  if (!spent) return h("div", {}, h("p", { textContent: `It is still running. State: ${sequence.state}.` }), where);
  const parts = [
    ["queue", "waited for a slot", spent.queue_ms],
    ["prefill", "read the prompt", spent.prompt_ms],
    ["decode", "wrote", Math.max(0, spent.predicted_ms - spent.stalled_ms)],
    ["stalled", "was paused", spent.stalled_ms],
  ];
  const bar = h("div", { className: "why-bar", "aria-hidden": "true" });
  const key = h("dl", { className: "why-key" });
  for (const [kind, label, milliseconds] of parts) {
    const part = h("i", { className: kind });
    part.style.flexGrow = String(milliseconds);
    bar.append(part);
    key.append(h("div", {}, h("dt", { className: kind, textContent: label }), h("dd", { textContent: duration(milliseconds) })));
  }
  return h("div", {}, h("p", { textContent: sentence(spent) }), bar, key, where);
}

/** @param {any} spent */
function sentence(spent) {
  const found = spent.cache_n
    ? `${count(spent.cache_n, "prompt token")} came from the cache, ${spent.prompt_n} had to be computed.`
    : `All ${count(spent.prompt_n, "prompt token")} had to be computed: the cache had none of them.`;
  const others = spent.mean_batch - 1;
  const company =
    others < 0.05
      ? "It was computed alone."
      : `On average, ${others.toFixed(1)} others were computed in the same batches.`;
  const lost = spent.preemptions
    ? ` It lost its slot ${count(spent.preemptions, "time")}, for ${duration(spent.preempted_ms)}, because the cache was full.`
    : "";
  const moved = spent.failovers ? ` Its replica was lost ${count(spent.failovers, "time")}, and another one continued.` : "";
  return `${found} ${company}${lost}${moved}`;
}
