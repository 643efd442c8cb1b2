// What both views share: elements, numbers as text, and questions to the server under its key.

/** An element with properties (or attributes, where there is no such property) and children: elements, or strings as text. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** A plain button. */
export function button(text, onclick, properties = {}) {
  const made = element("button", { type: "button", className: "plain", ...properties }, text);
  made.addEventListener("click", onclick);
  return made;
}

/** A storage of the browser, or one that lasts as long as the page, where the reader forbids it. */
function storage(name) {
  try {
    return window[name];
  } catch {
    const kept = new Map();
    return { getItem: (key) => kept.get(key) ?? null, setItem: (...entry) => kept.set(...entry), removeItem: (key) => kept.delete(key) };
  }
}

export const local = storage("localStorage");
export const session = storage("sessionStorage");

/** Keep a text in this browser. Returns false if there is no room for it. */
export function store(key, text) {
  try {
    local.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

/** What was kept as JSON; null if there is nothing, or something else. */
export function recall(key) {
  try {
    return JSON.parse(local.getItem(key));
  } catch {
    return null;
  }
}

/** `63 ms`, `2.4 s`, `3 min 20 s`. */
export function duration(ms) {
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

export const count = (number) => Math.round(number).toLocaleString("en");
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const share = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "0 %");

// The server

const KEY = "penstock.key";
const LIMIT_MS = 5000;
let asking = null; // The dialog's promise, while it is open: it asks once, however many questions wait for the key.

export class ServerError extends Error {
  /** `status` 0: there was no answer. `retryAfterMs`: null, or the time after which the server wants to be asked again. */
  constructor(message, status, code = "", retryAfterMs = null) {
    super(message);
    Object.assign(this, { status, code, retryAfterMs });
  }
}

/**
 * The response to a question. It asks the reader for a key if the server does. Throws `ServerError` for any other status, and
 * after `LIMIT_MS`, unless `options` has a signal that ends the question.
 */
export async function ask(path, options = {}) {
  for (;;) {
    const key = session.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const signal = options.signal ?? AbortSignal.timeout(LIMIT_MS);
    const response = await answered(fetch(path, { ...options, headers, signal }));
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    const hasOther = session.getItem(KEY) !== key; // The reader gave one meanwhile.
    if (!hasOther && !(await askForKey(error))) throw error;
  }
}

export const askText = async (path) => answered((await ask(path)).text());
export const askJson = async (path) => JSON.parse(await askText(path));

const answered = (promise) => promise.catch((error) => {
  if (error.name === "AbortError") throw error;
  throw new ServerError("The server does not answer.", 0);
});

async function errorOf(response) {
  const after = response.headers.get("Retry-After-Ms");
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? `The server answered ${response.status}.`;
  return new ServerError(message, response.status, body.error?.code, after === null ? null : Number(after));
}

/** Opens the dialog. The promise says whether there is a key to try. */
function askForKey(error) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key").value = "";
    byId("key-message").textContent = session.getItem(KEY) ? error.message : "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = dialog.returnValue === "use" ? byId("key").value.trim() : "";
      byId("key").value = "";
      if (key) session.setItem(KEY, key);
      showKeyButton();
      resolve(Boolean(key));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

function showKeyButton() {
  byId("key-button").hidden = !session.getItem(KEY);
}

byId("key-button").addEventListener("click", () => {
  session.removeItem(KEY);
  showKeyButton();
});
showKeyButton();

/** The data of server-sent events: a list of those that come at once. https://html.spec.whatwg.org/multipage/server-sent-events.html */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
  }
}

/** A new id: for a conversation, or for a request, so that it can be asked about before its answer begins. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9)); // `crypto.randomUUID` needs HTTPS.
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
