/** Corral's public API, with the key where one is needed. */

const KEY = "corral.key";

/** @returns {string | null} */
export const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);

/** @param {string} value @param {boolean} remember  in this browser, and not only in this tab */
export function setKey(value, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
}

/** What the server said is wrong. */
export class ApiError extends Error {
  /** @param {number} status @param {any} body @param {string | null} retryAfter */
  constructor(status, body, retryAfter) {
    const said = body?.error?.message ?? `The server answered with status ${status}.`;
    super(retryAfter ? `${said} (Try again in ${retryAfter} s.)` : said);
    this.status = status;
  }
}

/** Whoever was asked for a key has none. */
export class NoKeyError extends Error {}

/** Asks for a key, and resolves when there is a new one; set by `app.js`. @type {{ask: (why: string) => Promise<void>}} */
export const door = { ask: () => Promise.reject(new NoKeyError()) };

/**
 * Ask the API; where it wants a key, ask for one and try again.
 * @param {string} path  without a leading slash
 * @param {{body?: object, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
export async function ask(path, options = {}) {
  const form = options.body instanceof FormData ? options.body : undefined;
  const isJson = options.body !== undefined && !form;
  for (;;) {
    const used = key();
    const answer = await fetch(new URL(path, document.baseURI), {
      method: options.body ? "POST" : "GET",
      headers: {
        ...(isJson ? { "Content-Type": "application/json" } : {}),
        ...(used ? { Authorization: `Bearer ${used}` } : {}),
      },
      body: isJson ? JSON.stringify(options.body) : form,
      signal: options.signal,
      cache: "no-store",
    });
    if (answer.ok) return answer;
    const body = await answer.json().catch(() => null);
    const error = new ApiError(answer.status, body, answer.headers.get("retry-after"));
    if (error.status !== 401) throw error;
    if (key() === used) await door.ask(used ? error.message : "");
  }
}

/** @param {string} path @returns {Promise<any>} */
export const askJson = async (path) => (await ask(path)).json();

/**
 * The JSON of each server-sent event, up to the end or `[DONE]`. Leaving the loop closes the connection.
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal, onHeaders?: (headers: Headers) => void}} [options]
 */
export async function* events(path, options = {}) {
  const answer = await ask(path, options);
  options.onHeaders?.(answer.headers);
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop() ?? "";
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
