/** The chat: one conversation at a time, several kept in the browser. */
import * as api from "../common/api.js";
import { AnswerView, question } from "./answer.js";
import { announce, byId, copyButton, h } from "../common/dom.js";
import { Microphone } from "./microphone.js";
import { PictureTray } from "./pictures.js";
import { answer, bodyOf, curl } from "./request.js";
import { fillModels, settingsForm, writers } from "../common/settings.js";
import * as store from "../common/store.js";
import { count } from "../common/why.js";

const IDEAS = [
  "Tell me a story about a brave fox.",
  "What is the capital of Portugal?",
  "List three fruits.",
];

const MOST_TEXT_BYTES = 200_000;

export class ChatPage {
  /** @type {{id: string, capabilities?: string[]}[]} */
  #models = [];
  #pictures = new PictureTray();
  #microphone = new Microphone(() => this.#chat.model, insert);
  #chat = store.newChat("", store.noSettings());
  /** @type {AbortController | null} */
  #running = null;

  constructor() {
    const field = byId("question");
    byId("ask").onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      if (this.#running) this.#running.abort();
      else this.#send(field.value);
    };
    growing(field, byId("ask"));
    byId("search-chats").oninput = () => this.#list();
    byId("text-file").onchange = () => attach(byId("text-file"));
    byId("add-text").onclick = () => byId("text-file").click();
    byId("new-chat").onclick = () => this.#open(store.newChat(this.#chat.model, this.#chat.settings));
    byId("chat-model").onchange = () => this.#choose(byId("chat-model").value);
    toggling(byId("settings-button"), byId("settings"));
    toggling(byId("side-button"), byId("side"), "open");
    byId("export-json").onclick = () => this.#exportJson();
    byId("export-curl").onclick = () => this.#showCurl();
    const [last] = store.chats();
    this.#open(last ?? this.#chat);
  }

  async show() {
    byId("question").focus();
    if (this.#models.length) return;
    try {
      this.#models = writers((await api.askJson("v1/models")).data);
      this.#choose(fillModels(byId("chat-model"), this.#models, this.#chat.model));
    } catch (error) {
      byId("messages").replaceChildren(h("p", { className: "error", role: "alert", textContent: error instanceof Error ? error.message : "" }));
    }
  }

  hide() {}

  /** @param {string} model */
  #choose(model) {
    this.#chat.model = model;
    const known = this.#models.find((one) => one.id === model);
    this.#pictures.enabled = known?.capabilities?.includes("vision") ?? false;
    this.#microphone.enabled = known?.capabilities?.includes("audio") ?? false;
  }

  /** @param {store.Chat} chat */
  #open(chat) {
    this.#running?.abort();
    this.#chat = chat;
    if (this.#models.length) this.#choose(fillModels(byId("chat-model"), this.#models, chat.model));
    byId("settings-form").replaceChildren(settingsForm(chat.settings, () => {}));
    byId("side").classList.remove("open");
    byId("side-button").setAttribute("aria-expanded", "false");
    this.#showMessages();
    this.#list();
  }

  #list() {
    byId("chat-title").textContent = this.#chat.title;
    const wanted = byId("search-chats").value.trim().toLowerCase();
    const items = store.chats().filter((chat) => store.textOf(chat).includes(wanted)).map((chat) => {
      const open = h("button", { type: "button", className: "chat", textContent: chat.title });
      if (chat.id === this.#chat.id) open.setAttribute("aria-current", "true");
      open.onclick = () => this.#open(chat);
      const remove = h("button", { type: "button", className: "remove", textContent: "×", "aria-label": `Delete ${chat.title}` });
      remove.onclick = () => this.#remove(chat);
      const rename = h("button", { type: "button", className: "remove", textContent: "✎", "aria-label": `Rename ${chat.title}` });
      const item = h("li", {}, open, rename, remove);
      rename.onclick = () => this.#rename(chat, item);
      return item;
    });
    byId("chats").replaceChildren(...items);
  }

  /** @param {store.Chat} chat @param {HTMLElement} item */
  #rename(chat, item) {
    const field = h("input", { value: chat.title, "aria-label": "New title", maxLength: 60 });
    const form = h("form", {}, field);
    form.onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      const title = field.value.trim() || chat.title;
      if (chat.id === this.#chat.id) this.#chat.title = title;
      store.rename(chat.id, title);
      this.#list();
    };
    field.onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") this.#list();
    };
    item.replaceChildren(form);
    field.select();
  }

  /** @param {store.Chat} chat */
  #remove(chat) {
    store.forget(chat.id);
    announce(`Deleted ${chat.title}`);
    if (chat.id !== this.#chat.id) this.#list();
    else this.#open(store.chats()[0] ?? store.newChat(chat.model, chat.settings));
  }

  #showMessages() {
    const { messages } = this.#chat;
    const shown = messages.map((message, i) =>
      message.role === "assistant" ? this.#answerView(message, i).finish().element : this.#question(message, i),
    );
    byId("messages").replaceChildren(...(shown.length ? shown : [this.#welcome()]));
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  /** @param {store.Message} message @param {number} i  its place */
  #question(message, i) {
    const element = question(message);
    if (message.role !== "user") return element;
    const edit = h("button", { type: "button", className: "quiet edit", textContent: "Edit" });
    edit.onclick = () => this.#edit(message, i, element);
    element.append(edit);
    return element;
  }

  /** Ask again from here on, in other words. @param {store.Message} message @param {number} i @param {HTMLElement} element */
  #edit(message, i, element) {
    const field = h("textarea", { value: message.content, rows: 3, "aria-label": "Edited message" });
    const cancel = h("button", { type: "button", className: "quiet", textContent: "Cancel" });
    const form = h("form", { className: "edited" }, field, h("button", { textContent: "Ask again" }), cancel);
    form.onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      if (this.#running || !field.value.trim()) return;
      this.#chat.messages.splice(i, Infinity, { ...message, content: field.value });
      this.#answer();
    };
    cancel.onclick = () => element.replaceWith(this.#question(message, i));
    growing(field, form);
    element.replaceChildren(form);
    field.focus();
  }

  #welcome() {
    const ideas = IDEAS.map((text) => {
      const button = h("button", { type: "button", className: "idea", textContent: text });
      button.onclick = () => this.#send(text);
      return h("li", {}, button);
    });
    return h(
      "div",
      { className: "welcome" },
      h("h3", { textContent: "Ask the model" }),
      h("p", { textContent: "Nothing leaves this server, and conversations stay in your browser." }),
      h("ul", {}, ...ideas),
    );
  }

  /** @param {store.Message} message @param {number} i  its place */
  #answerView(message, i) {
    const isLast = i === this.#chat.messages.length - 1;
    const actions = () => {
      if (this.#chat.messages.at(-1) !== message) return [];
      const again = h("button", { type: "button", className: "quiet again", textContent: "Regenerate" });
      again.onclick = () => this.#regenerate();
      return [again];
    };
    const onResults = isLast ? (/** @type {string[]} */ results) => this.#giveResults(message, results) : undefined;
    return new AnswerView(message, { actions, onResults });
  }

  /** @param {string} text */
  #send(text) {
    if (!(text.trim() || this.#pictures.length) || this.#running) return;
    const { messages } = this.#chat;
    if (!messages.length) this.#chat.title = text.trim().slice(0, 60) || "A picture";
    const pictures = this.#pictures.take();
    messages.push({ role: "user", content: text, ...(pictures.length ? { pictures } : {}) });
    byId("question").value = "";
    byId("question").dispatchEvent(new Event("input"));
    this.#answer();
  }

  #regenerate() {
    if (this.#running) return;
    this.#chat.messages.pop();
    this.#answer();
  }

  /** @param {store.Message} message @param {string[]} results */
  #giveResults(message, results) {
    (message.tool_calls ?? []).forEach((one, i) => {
      this.#chat.messages.push({ role: "tool", content: results[i], tool_call_id: one.id });
    });
    this.#answer();
  }

  async #answer() {
    const chat = this.#chat;
    const message = /** @type {store.Message} */ ({ role: "assistant", content: "", meta: { model: chat.model } });
    let body;
    try {
      body = bodyOf(chat.model, chat.settings, chat.messages);
    } catch (error) {
      this.#showMessages();
      byId("messages").append(h("p", { className: "error", role: "alert", textContent: error instanceof Error ? error.message : "" }));
      return;
    }
    chat.messages.push(message);
    store.keep(chat);
    this.#list();
    this.#showMessages();
    const view = this.#answerView(message, chat.messages.length - 1).begin();
    byId("messages").lastChild.replaceWith(view.element);
    const running = (this.#running = new AbortController());
    setSending(byId("send"), true);
    announce("The answer begins.");
    const follow = following(byId("messages"));
    await answer(body, message, running.signal, () => {
      view.update();
      follow();
    });
    view.finish();
    follow();
    if (store.chats().some((one) => one.id === chat.id)) store.keep(chat); // it may have been deleted
    if (this.#running === running) this.#running = null;
    setSending(byId("send"), this.#running !== null);
    const n = message.meta?.usage?.completion_tokens;
    announce(message.meta?.finish === "stopped" ? "Stopped." : `The answer is complete${n ? `: ${count(n, "token")}` : ""}.`);
  }

  #exportJson() {
    const text = JSON.stringify(this.#chat, null, 2);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const name = this.#chat.title.replace(/[^\w]+/g, "-").slice(0, 40) || "chat";
    h("a", { href: url, download: `${name}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  #showCurl() {
    const { model, settings, messages } = this.#chat;
    const asked = messages.at(-1)?.role === "assistant" ? messages.slice(0, -1) : messages;
    const text = curl(bodyOf(model, settings, asked), api.key() !== null);
    byId("curl").textContent = text;
    const close = h("button", { type: "button", textContent: "Close" });
    close.onclick = () => byId("curl-dialog").close();
    byId("curl-actions").replaceChildren(copyButton(() => text), close);
    byId("curl-dialog").showModal();
  }
}

/** A button that sends, or stops what it has sent. @param {any} button @param {boolean} sending */
export function setSending(button, sending) {
  button.textContent = sending ? "Stop" : "Send";
  button.classList.toggle("stop", sending);
}

/** Put text that was said, or is in a file, behind what is written. @param {string} text */
function insert(text) {
  const field = byId("question");
  field.value = [field.value.trim(), text.trim()].filter(Boolean).join(/^\s/.test(text) ? "\n\n" : " ");
  field.dispatchEvent(new Event("input"));
  field.focus();
}

/** Put a text file behind what is written, under its name. @param {any} input */
async function attach(input) {
  const [file] = input.files;
  input.value = "";
  const text = file.size <= MOST_TEXT_BYTES ? await file.text() : null;
  const why = text === null ? `is larger than ${MOST_TEXT_BYTES / 1000} kB` : text.includes("\0") ? "is no text" : "";
  byId("picture-error").replaceChildren(
    ...(why ? [h("p", { className: "error", role: "alert", textContent: `${file.name} ${why}.` })] : []),
  );
  if (!why) insert(`\n\n${file.name}:\n\`\`\`\n${text}\n\`\`\`\n`);
}

/** A text field that grows, and sends with Enter, but never stops what was sent. @param {any} field @param {any} form */
export function growing(field, form) {
  field.oninput = () => {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, 240)}px`;
  };
  field.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!form.querySelector("button.stop")) form.requestSubmit();
  };
}

/** Keep the end in sight, unless the reader has scrolled away from it. @param {HTMLElement} scrolled */
function following(scrolled) {
  let wanted = true;
  scrolled.onscroll = () => {
    wanted = scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 60;
  };
  scrolled.scrollTop = scrolled.scrollHeight;
  return () => requestAnimationFrame(() => wanted && (scrolled.scrollTop = scrolled.scrollHeight));
}

/** @param {any} button @param {any} panel @param {string} [className]  that opens it; else it is hidden */
function toggling(button, panel, className) {
  button.onclick = () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    if (className) panel.classList.toggle(className, open);
    else panel.hidden = !open;
  };
}
