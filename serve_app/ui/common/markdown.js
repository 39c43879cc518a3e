/**
 * Markdown as elements. What models write is not trusted: it is read into marked's tokens, and from these
 * elements are made one by one. There is no HTML in between, so HTML stays the text that it is; images become
 * links, and links that are no web addresses become text.
 */
import { lexer } from "../vendor/marked.js";
import { copyButton, h } from "./dom.js";

/** @typedef {any} Token */

const OPTIONS = { gfm: true, breaks: true };
const SAFE = new Set(["http:", "https:", "mailto:"]);

/** @param {string} href @returns {string | null}  null if it is not safe to follow */
function safe(href) {
  try {
    const url = new URL(href); // without a base: addresses on this server are none that a model knows
    return SAFE.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** @param {string} text */
function decoded(text) {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => ENTITIES[name]);
}
/** @type {Record<string, string>} */
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'" };

/** @param {Token} token @param {string} text */
function link(token, text) {
  const href = safe(token.href);
  if (!href) return document.createTextNode(token.raw);
  const children = token.tokens && token.type === "link" ? inline(token.tokens) : [text];
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, ...children);
}

/** @param {Token[]} tokens @returns {Node[]} */
const inline = (tokens) => tokens.map(inlineOne);

/** @param {Token} token @returns {Node} */
function inlineOne(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return h(token.type, {}, ...inline(token.tokens));
    case "codespan":
      return h("code", { textContent: token.text });
    case "br":
      return h("br");
    case "link":
      return link(token, token.text);
    case "image":
      return link(token, token.text || token.href);
    case "checkbox":
      return h("input", { type: "checkbox", checked: token.checked, disabled: true, "aria-label": "item" });
    case "text":
    case "escape":
      return token.tokens
        ? h("span", {}, ...inline(token.tokens))
        : document.createTextNode(decoded(token.text));
    default: // HTML, above all
      return document.createTextNode(token.raw);
  }
}

/** @param {Token} token */
function code(token) {
  const language = (token.lang ?? "").split(/\s/)[0];
  const pre = h("pre", { tabIndex: 0 }, h("code", { textContent: token.text }));
  const head = h(
    "figcaption",
    {},
    h("span", { textContent: language || "text" }),
    copyButton(() => token.text),
  );
  return h("figure", { className: "code" }, head, pre);
}

/** @param {Token} token */
function table(token) {
  const cell = (/** @type {string} */ tag) => (/** @type {Token} */ one, /** @type {number} */ i) => {
    const align = token.align[i];
    return h(tag, { className: align ? `align-${align}` : "" }, ...inline(one.tokens));
  };
  const rows = token.rows.map((/** @type {Token[]} */ row) => h("tr", {}, ...row.map(cell("td"))));
  const head = h("thead", {}, h("tr", {}, ...token.header.map(cell("th"))));
  return h("div", { className: "scroll", tabIndex: 0 }, h("table", {}, head, h("tbody", {}, ...rows)));
}

/** @param {Token} token */
function list(token) {
  const props = token.ordered ? { start: Number(token.start) || 1 } : {};
  const items = token.items.map((/** @type {Token} */ item) => h("li", {}, ...blocks(item.tokens)));
  return h(token.ordered ? "ol" : "ul", props, ...items);
}

/** @param {Token[]} tokens @returns {Node[]} */
const blocks = (tokens) => tokens.filter((one) => one.type !== "space").map(block);

/** @param {Token} token @returns {Node} */
function block(token) {
  switch (token.type) {
    case "heading": // the page's own headings come first
      return h(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens));
    case "paragraph":
      return h("p", {}, ...inline(token.tokens));
    case "code":
      return code(token);
    case "blockquote":
      return h("blockquote", {}, ...blocks(token.tokens));
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return h("hr");
    case "html":
    case "def":
      return h("p", { className: "raw", textContent: token.raw.trimEnd() });
    default:
      return inlineOne(token);
  }
}

/**
 * A text that grows, as elements in `root`. Only what may still change is read again: the blocks before the
 * last one are done, so a long answer costs no more per token than a short one.
 */
export class Markdown {
  #root;
  #done = 0; // characters whose blocks are final
  #nDone = 0; // elements that show them

  /** @param {HTMLElement} root */
  constructor(root) {
    this.#root = root;
  }

  /** @param {string} text  that begins with what was shown before */
  show(text) {
    const rest = text.replace(/\r\n?/g, "\n").slice(this.#done);
    const tokens = lexer(rest, OPTIONS);
    const nSettled = Math.max(0, tokens.findLastIndex((one) => one.type !== "space"));
    const settled = tokens.slice(0, nSettled);
    const last = blocks(tokens.slice(nSettled));
    while (this.#root.childNodes.length > this.#nDone) this.#root.lastChild?.remove();
    const made = blocks(settled);
    this.#root.append(...made, ...last);
    const read = settled.map((one) => one.raw).join("");
    if (!rest.startsWith(read)) return; // marked has changed it: all of it is read again the next time
    this.#nDone += made.length;
    this.#done += read.length;
  }
}
