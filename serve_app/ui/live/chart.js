/** Charts, as SVG that the style sheet colours. */
import { h, s } from "../common/dom.js";

/** The next of 1, 2, 5, 10, 20, ... that is as large. @param {number} value */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value) ?? 10 * power;
}

/** @param {[number, number][]} points */
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** Generated and prompt tokens a second over time, one above the other, with what happened. */
export class Timeline {
  #root;

  /** @param {HTMLElement} root */
  constructor(root) {
    this.#root = root;
  }

  /**
   * @param {{at: number, generated: number, prompt: number}[]} points
   * @param {{at: number, kind: string, text: string}[]} happened
   * @param {number} seconds  that are shown at most
   */
  show(points, happened, seconds) {
    const width = this.#root.clientWidth;
    if (!width || !points.length) return;
    const [rowHeight, gap, foot] = [64, 14, 18];
    const height = 2 * rowHeight + gap + foot;
    const now = points[points.length - 1].at;
    const span = Math.min(seconds, Math.max(60, now - points[0].at));
    const x = (/** @type {number} */ at) => width * (1 - (now - at) / span);
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    const visible = points.filter((one) => now - one.at <= span);
    const last = visible[visible.length - 1];
    svg.setAttribute("aria-label", `${Math.round(last.generated)} generated and ${Math.round(last.prompt)} prompt tokens a second now`);
    for (const [i, name] of /** @type {const} */ (["generated", "prompt"]).entries()) {
      const base = i * (rowHeight + gap) + rowHeight;
      const most = rounded(Math.max(1, ...visible.map((one) => one[name])));
      const line = /** @type {[number, number][]} */ (visible.map((one) => [x(one.at), base - ((rowHeight - 12) * one[name]) / most]));
      const area = `${path(line)}L${x(last.at)},${base}L${x(visible[0].at)},${base}Z`;
      svg.append(
        s("line", { class: "base", x1: 0, x2: width, y1: base, y2: base }),
        s("path", { class: `area ${name}`, d: area }),
        s("path", { class: `line ${name}`, d: path(line) }),
        label(0, base - rowHeight + 9, `${most.toLocaleString("en")}`),
      );
    }
    for (const one of happened) {
      if (now - one.at > span) continue;
      const mark = s("g", { class: `event ${one.kind}` });
      const at = Math.max(2, Math.min(width - 4, x(one.at)));
      mark.append(
        s("title", {}, document.createTextNode(one.text)),
        s("line", { x1: at, x2: at, y1: 0, y2: height - foot }),
        s("circle", { cx: at, cy: height - foot + 1, r: 3.5 }),
      );
      svg.append(mark);
    }
    svg.append(label(0, height - 4, `${Math.round(span / 60)} min ago`), label(width, height - 4, "now", "end"));
    this.#root.replaceChildren(svg);
  }
}

/** @param {number} x @param {number} y @param {string} text @param {string} [anchor] */
function label(x, y, text, anchor = "start") {
  return s("text", { x, y, "text-anchor": anchor }, document.createTextNode(text));
}

/** Prompt and generated tokens of each day, one on the other. */
export class DayBars {
  #root;

  /** @param {HTMLElement} root */
  constructor(root) {
    this.#root = root;
  }

  /** @param {{day: string, prompt: number, generated: number}[]} days */
  show(days) {
    const width = this.#root.clientWidth;
    if (!width || !days.length) return this.#root.replaceChildren();
    const [height, foot, top] = [150, 18, 14];
    const base = height - foot;
    const sums = days.map((one) => one.prompt + one.generated);
    const most = rounded(Math.max(1, ...sums));
    const y = (/** @type {number} */ n) => ((base - top) * n) / most;
    const step = width / days.length;
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    svg.setAttribute("aria-label", `Tokens by day: ${sums.reduce((a, b) => a + b, 0).toLocaleString("en")} in ${days.length} days`);
    for (const [i, { day, prompt, generated }] of days.entries()) {
      const text = `${day}: ${prompt.toLocaleString("en")} prompt and ${generated.toLocaleString("en")} generated tokens`;
      const bar = { x: i * step + step * 0.1, width: step * 0.8 };
      svg.append(
        s(
          "g",
          { class: "day" },
          s("title", {}, document.createTextNode(text)),
          s("rect", { class: "bar prompt", ...bar, y: base - y(prompt), height: y(prompt) }),
          s("rect", { class: "bar generated", ...bar, y: base - y(prompt + generated), height: y(generated) }),
        ),
      );
    }
    svg.append(
      s("line", { class: "base", x1: 0, x2: width, y1: base, y2: base }),
      label(0, top - 4, most.toLocaleString("en")),
      label(0, height - 4, days[0].day),
      label(width, height - 4, "today", "end"),
    );
    this.#root.replaceChildren(svg);
  }
}

/** What a batch takes by its sequences, and where the engine works now. */
export class StepCurve {
  #shown = "";

  constructor() {
    this.element = h("figure", { className: "curve" });
  }

  /**
   * @param {Record<string, number>} curve  milliseconds by sequences
   * @param {[number, number] | null} point  of an average batch now: sequences and milliseconds
   * @param {number} nSlots
   */
  show(curve, point, nSlots) {
    const made = JSON.stringify([curve, point]);
    if (made === this.#shown) return;
    this.#shown = made;
    const [width, height, left, bottom] = [260, 150, 38, 30];
    const known = Object.entries(curve).map(([n, ms]) => /** @type {[number, number]} */ ([Number(n), ms]));
    const mostX = Math.max(nSlots, ...known.map(([n]) => n));
    const mostY = rounded(Math.max(0.01, point?.[1] ?? 0, ...known.map(([, ms]) => ms)));
    const x = (/** @type {number} */ n) => left + ((width - left - 8) * (n - 1)) / Math.max(1, mostX - 1);
    const y = (/** @type {number} */ ms) => height - bottom - ((height - bottom - 10) * ms) / mostY;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    const said = point ? `now ${point[0]} sequences, ${point[1]} ms` : "idle now";
    svg.setAttribute("aria-label", `Time of a batch by sequences; ${said}`);
    svg.append(
      s("line", { class: "base", x1: left, x2: width - 8, y1: y(0), y2: y(0) }),
      label(left - 6, y(mostY) + 4, String(mostY), "end"),
      label(left - 6, y(0), "0", "end"),
      label(left, height - bottom + 13, "1"),
      label(width - 8, height - bottom + 13, String(mostX), "end"),
      s("path", { class: "line curve", d: path(known.map(([n, ms]) => [x(n), y(ms)])) }),
      ...known.map(([n, ms]) => s("circle", { class: "known", cx: x(n), cy: y(ms), r: 2 })),
    );
    if (point) svg.append(s("circle", { class: "now", cx: x(Math.max(1, Math.min(point[0], mostX))), cy: y(point[1]), r: 5 }));
    const text = point ? `Now: ${point[0]} sequences, ${point[1]} ms a batch` : "Idle now";
    this.element.replaceChildren(
      h("figcaption", { textContent: "Milliseconds a batch, by sequences in it" }),
      svg,
      h("p", { className: "fine", textContent: known.length ? text : `${text}; not measured yet` }),
    );
  }
}
