/** Making elements. Everything on the page is made here: never from a string of HTML. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `props` are properties (`textContent`, `onclick`), or attributes if their names have a dash, or
 * are `role` or `for`; children are elements or texts; null is left out.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Node | string | null | undefined)} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value == null) continue;
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else /** @type {any} */ (element)[name] = value;
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/**
 * An SVG element; all of `props` are attributes.
 * @param {string} tag
 * @param {Record<string, string | number>} [props]
 * @param {...Node} children
 * @returns {any}
 */
export function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** Set a text only if it is another one: what does not change costs no layout. */
export function setText(/** @type {Node} */ node, /** @type {string} */ text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Tell those who hear the page, once. @param {string} text */
export function announce(text) {
  byId("status").textContent = text;
}

/** A button that copies a text and says so. @param {() => string} text @param {string} [label] */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", className: "quiet", textContent: label });
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Cannot copy";
    }
    setTimeout(() => (button.textContent = label), 1500);
  };
  return button;
}

/** Call a function at most once a frame, however often it is asked for. @param {() => void} run */
export function onceAFrame(run) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      run();
    });
  };
}

/**
 * Terms with a value and a note, made once and then only changed.
 * @param {HTMLElement} root @param {[string, string, string][]} values
 */
export function tiles(root, values) {
  while (root.children.length < values.length) {
    root.append(h("div", {}, h("dt"), h("dd"), h("dd", { className: "note" })));
  }
  values.forEach(([term, value, note], i) => {
    const [dt, dd, small] = root.children[i].children;
    setText(dt, term);
    setText(dd, value);
    setText(small, note);
  });
}
