/** Keeps conversations and choices in the browser. Never the key, which `api.js` keeps. */

const CHATS = "corral.chats";

/**
 * @typedef {{system: string, temperature: string, top_p: string, top_k: string, min_p: string,
 *   max_tokens: string, seed: string, more: string}} Settings
 * @typedef {{id?: string, model?: string, ttft_ms?: number, total_ms?: number, finish?: string,
 *   usage?: any, timings?: any, error?: string, ignored?: string}} Meta
 * @typedef {{role: string, content: string, pictures?: string[], reasoning?: string, tool_calls?: any[], tool_call_id?: string,
 *   meta?: Meta}} Message
 * @typedef {{id: string, title: string, model: string, settings: Settings, messages: Message[],
 *   updated: number}} Chat
 */

/** @returns {Settings} */
export const noSettings = () => ({
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  more: "",
});

/** @param {string} name @param {any} fallback */
export function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? "null") ?? fallback;
  } catch {
    return fallback;
  }
}

/** @param {string} name @param {any} value @returns {boolean}  whether there was room */
export function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** The newest first. @returns {Chat[]} */
export const chats = () => read(CHATS, []);

/** Keep a conversation; the oldest go if there is no room. @param {Chat} chat */
export function keep(chat) {
  chat.updated = Date.now();
  const kept = [chat, ...chats().filter((one) => one.id !== chat.id)];
  while (!write(CHATS, kept) && kept.length > 1) kept.pop();
}

/** What a conversation can be found by, in lower case. @param {Chat} chat */
export const textOf = (chat) => [chat.title, ...chat.messages.map((one) => one.content)].join("\n").toLowerCase();

/** @param {string} id @param {string} title */
export function rename(id, title) {
  write(CHATS, chats().map((one) => (one.id === id ? { ...one, title } : one)));
}

/** @param {string} id */
export function forget(id) {
  write(CHATS, chats().filter((one) => one.id !== id));
}

/** @param {string} model @param {Settings} settings @returns {Chat} */
export const newChat = (model, settings) => ({
  id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), // only secure contexts have it
  title: "New chat",
  model,
  settings: { ...settings },
  messages: [],
  updated: Date.now(),
});
