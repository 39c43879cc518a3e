/** Pictures of the next message: chosen, pasted or dropped, and scaled here. They go to the server with the question. */
import { announce, byId, h } from "../common/dom.js";

const LONGEST_EDGE = 1024;
const QUALITY = 0.9;
const MOST = 16; // in a request

export class PictureTray {
  /** @type {string[]} */
  #urls = [];
  #tray = byId("pictures");

  constructor() {
    const form = byId("ask");
    const file = byId("picture-file");
    byId("add-picture").onclick = () => file.click();
    file.onchange = () => {
      this.#add(file.files);
      file.value = "";
    };
    byId("question").addEventListener("paste", (/** @type {ClipboardEvent} */ event) => {
      if (!this.enabled || !event.clipboardData?.files.length) return;
      event.preventDefault();
      this.#add(event.clipboardData.files);
    });
    const view = byId("chat");
    view.ondragover = (/** @type {DragEvent} */ event) => {
      if (!this.enabled || !event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      form.classList.add("dropping");
    };
    view.ondragleave = () => form.classList.remove("dropping");
    view.ondrop = (/** @type {DragEvent} */ event) => {
      form.classList.remove("dropping");
      if (!this.enabled || !event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.#add(event.dataTransfer.files);
    };
  }

  /** Whether the model sees. */
  get enabled() {
    return !byId("add-picture").hidden;
  }

  set enabled(/** @type {boolean} */ value) {
    byId("add-picture").hidden = !value;
    if (!value) this.take();
  }

  get length() {
    return this.#urls.length;
  }

  /** The pictures, as data URLs; none are left. @returns {string[]} */
  take() {
    const taken = this.#urls;
    this.#urls = [];
    this.#show();
    return taken;
  }

  /** @param {FileList} files */
  async #add(files) {
    for (const file of files) {
      try {
        const url = await scaled(file);
        if (this.#urls.length >= MOST) return announce(`A message may have ${MOST} pictures.`);
        if (!this.enabled) return; // another model was chosen meanwhile
        this.#urls.push(url);
        this.#show();
        announce(`Added ${file.name}`);
      } catch {
        const textContent = `${file.name} is not a picture that this browser can read.`;
        byId("picture-error").replaceChildren(h("p", { className: "error", role: "alert", textContent }));
        return;
      }
    }
  }

  #show() {
    byId("picture-error").replaceChildren();
    const items = this.#urls.map((url, i) => {
      const remove = h("button", { type: "button", className: "remove", textContent: "×", "aria-label": `Remove picture ${i + 1}` });
      remove.onclick = () => {
        this.#urls.splice(i, 1);
        this.#show();
      };
      return h("li", {}, h("img", { src: url, alt: `Picture ${i + 1}` }), remove);
    });
    this.#tray.replaceChildren(...items);
    this.#tray.hidden = !items.length;
  }
}

/**
 * A picture as a data URL, turned upright, and shrunk to what conversations in a browser have room for.
 * @param {Blob} file @returns {Promise<string>}
 * @throws {DOMException} if it cannot be read
 */
async function scaled(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  const factor = Math.min(1, LONGEST_EDGE / Math.max(bitmap.width, bitmap.height));
  const width = Math.max(1, Math.round(bitmap.width * factor));
  const height = Math.max(1, Math.round(bitmap.height * factor));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}
