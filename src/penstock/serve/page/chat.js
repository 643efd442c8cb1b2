// The chat: a conversation, its settings, and the stream that answers. The conversation is kept in localStorage.

import { ask, askJson, byId, counted, duration, element, eventsOf, newRequestId, ServerError } from "./shared.js";
import { codeBlock, copy, MarkdownView } from "./markdown.js";
import { showWhy } from "./why.js";

const STORE = "penstock.chat";
const FIELDS = ["model", "system", "temperature", "top_p", "max_tokens", "seed", "schema"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const WAIT_MS = 1000; // After it without a token, the server is asked what the request waits for; and again each time it passes.

/** What was said: `{role, content}`; of an answer also `reasoning`, `toolCalls`, `facts`, `error`. */
let messages = [];
let running = null; // The AbortController of the answer that is on its way.

const log = byId("log");
const prompt = byId("prompt");
const status = (text) => { byId("status").textContent = text; };

// What the browser keeps

function keep() {
  const settings = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
  try {
    localStorage.setItem(STORE, JSON.stringify({ settings, messages }));
  } catch {
    status("The browser has no room to keep this conversation. Copy what you need before you leave.");
  }
}

function recall() {
  const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const name of FIELDS) if (name !== "model") byId(name).value = kept.settings?.[name] ?? "";
  messages = kept.messages ?? [];
  return kept.settings?.model;
}

// Models

async function loadModels(chosen) {
  const { data } = await askJson("v1/models");
  const select = byId("model");
  select.replaceChildren(...data.map(({ id, status: { value } }) =>
    element("option", { value: id }, value === "loaded" ? id : `${id} (${value})`)));
  if (data.some(({ id }) => id === chosen)) select.value = chosen;
}

// The request

/** The body of the request, or null after the reader was shown which field is wrong. */
function bodyOf(history) {
  const wrong = NUMBERS.map(byId).find((field) => !field.checkValidity());
  const schema = readSchema();
  if (wrong || schema === null) {
    openSettings(true);
    if (wrong) wrong.reportValidity();
    else byId("schema").focus();
    return null;
  }
  const system = byId("system").value.trim();
  const body = {
    model: byId("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) if (byId(name).value !== "") body[name] = byId(name).valueAsNumber;
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

/** The schema, undefined if there is none, null if it is no JSON object. */
function readSchema() {
  const text = byId("schema").value.trim();
  let found;
  let trouble = "";
  try {
    found = text ? JSON.parse(text) : undefined;
    if (text && (found === null || typeof found !== "object" || Array.isArray(found))) trouble = "A schema is a JSON object.";
  } catch (error) {
    trouble = `This is no JSON: ${error.message}`;
  }
  byId("schema-error").textContent = trouble;
  byId("schema").setAttribute("aria-invalid", String(Boolean(trouble)));
  return trouble ? null : found;
}

/** Have the conversation answered, which ends with a message of the reader. */
async function answer() {
  const history = messages.filter(({ error, content }) => !error && content).map(({ role, content }) => ({ role, content }));
  const body = bodyOf(history);
  if (!body) return;
  const message = { role: "assistant", content: "", reasoning: "", toolCalls: [], facts: { requestId: newRequestId(), model: body.model } };
  messages.push(message);
  const view = new AnswerView(message);
  log.append(view.item);
  log.scrollTop = log.scrollHeight;
  setRunning(new AbortController());
  status("The answer is on its way.");
  try {
    await stream(body, message, view, running.signal);
    status(`The answer is complete: ${counted(message.facts.tokens ?? 0, "token")}.`);
  } catch (error) {
    if (error.name === "AbortError") {
      message.facts.end = "stopped";
      status("Stopped.");
    } else {
      message.error = error instanceof ServerError ? error.message : "The connection was lost.";
      message.retryAfterMs = error.retryAfterMs ?? null;
      status("There is no answer.");
    }
  }
  setRunning(null);
  await completeFacts(message);
  view.finish();
  keep();
}

async function stream(body, message, view, signal) {
  const begun = performance.now();
  const { facts } = message;
  let last = begun;
  const waiting = setInterval(() => tellWait(facts.requestId, view), WAIT_MS);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", "X-Request-Id": facts.requestId },
    });
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, response.status, event.error.code);
      if (event.usage) facts.tokens = event.usage.completion_tokens;
      const choice = event.choices[0];
      if (!choice) continue;
      if (addDelta(message, choice.delta)) {
        clearInterval(waiting);
        last = performance.now();
        facts.ttftMs ??= last - begun;
        facts.decodeMs = last - begun - facts.ttftMs;
        view.change();
      }
      facts.end = choice.finish_reason ?? facts.end;
    }
    throw new ServerError("The answer ended before it was complete: the connection was lost.", 0);
  } finally {
    clearInterval(waiting);
  }
}

/** Adds a piece of an answer. Returns whether it says anything. */
function addDelta(message, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  message.content += delta.content ?? "";
  message.reasoning += reasoning;
  for (const call of delta.tool_calls ?? []) {
    const known = (message.toolCalls[call.index ?? 0] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  return Boolean(delta.content || reasoning || delta.tool_calls?.length);
}

async function tellWait(requestId, view) {
  const told = await askJson(`v1/requests/${requestId}`).catch((error) => ({ summary: error.status === 404 ? "" : error.message }));
  view.wait(told.summary);
}

/** The tokens of an answer that was stopped are known to the server alone. */
async function completeFacts({ content, facts }) {
  if (facts.end !== "stopped" || !content) return;
  const told = await askJson(`v1/requests/${facts.requestId}`).catch(() => null); // Not remembered: then it is not shown.
  facts.tokens = told?.choices[0].completion_tokens;
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  log.setAttribute("aria-busy", String(Boolean(controller)));
}

// What is shown

const button = (text, onclick, properties = {}) => {
  const made = element("button", { type: "button", className: "plain", ...properties }, text);
  made.addEventListener("click", onclick);
  return made;
};

/** A message of the reader, which can be edited: what came after it is replaced by a new answer. */
function questionItem(message) {
  const text = element("div", { className: "text" }, message.content);
  const edit = button("Edit", () => {
    if (running) return;
    const field = element("textarea", { value: message.content, "aria-label": "Edited message", rows: 3 });
    const form = element("form", { className: "edit" }, field,
      element("button", { type: "submit", className: "strong" }, "Send again"), button("Cancel", close));
    function close() {
      form.replaceWith(text, tools);
      edit.focus();
    }
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      replaceFrom(message, { role: "user", content: field.value.trim() });
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (isSend(event)) form.requestSubmit();
    });
    tools.remove();
    text.replaceWith(form);
    field.focus();
  });
  const tools = element("p", { className: "tools" }, edit);
  return element("article", { className: "question", "aria-label": "You" }, text, tools);
}

/** An answer while it grows and after it. */
class AnswerView {
  constructor(message) {
    this.message = message;
    this.text = element("div", { className: "text" });
    this.markdown = new MarkdownView(this.text);
    const reasoningText = element("div", { className: "text" });
    this.reasoningMarkdown = new MarkdownView(reasoningText);
    this.reasoning = element("details", { hidden: true }, element("summary", {}, "Reasoning"), reasoningText);
    this.calls = element("div");
    this.note = element("p", { className: "note" }, "…");
    this.foot = element("div", { className: "foot" });
    this.item = element("article", { className: "answer", "aria-label": "Answer" },
      this.reasoning, this.text, this.calls, this.note, this.foot);
    this.isDrawing = false;
  }

  wait(text) {
    if (!this.message.content && text) this.note.textContent = text;
  }

  /** Draws at most once for each frame of the screen. */
  change() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.draw();
    });
  }

  draw() {
    const { content, reasoning, toolCalls } = this.message;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    this.note.hidden = true;
    this.markdown.show(content);
    this.reasoning.hidden = !reasoning;
    this.reasoningMarkdown.show(reasoning ?? "");
    this.calls.replaceChildren(...toolCalls.filter(Boolean).map(({ name, arguments: given }) => codeBlock(given, `Call of ${name}`)));
    if (follows) log.scrollTop = log.scrollHeight;
  }

  finish() {
    this.draw();
    const { error, retryAfterMs, content, facts } = this.message;
    const wait = retryAfterMs ? ` The server has room in ${duration(retryAfterMs)}.` : "";
    const told = error ? [element("p", { className: "error" }, error + wait)] : [];
    const panel = element("div", { className: "why", hidden: true });
    const why = button("Why was this slow?", () => {
      panel.hidden = !panel.hidden;
      why.setAttribute("aria-expanded", String(!panel.hidden));
      if (!panel.hidden) showWhy(panel, facts.requestId, facts.ttftMs ?? null).then(() => panel.scrollIntoView({ block: "nearest" }));
    }, { "aria-expanded": "false" });
    const again = button(error ? "Try again" : "Regenerate", () => {
      if (!running) replaceFrom(this.message);
    });
    const copies = content ? [button("Copy", (event) => copy(content, event.target))] : [];
    this.foot.replaceChildren(...told,
      element("p", { className: "facts-line" }, factsLine(facts)),
      element("p", { className: "tools" }, why, ...copies, again), panel);
    if (!running) log.scrollTop = log.scrollHeight;
  }
}

function factsLine({ tokens, ttftMs, decodeMs, model, end }) {
  const rate = tokens > 1 && decodeMs > 0 ? `${(((tokens - 1) * 1000) / decodeMs).toFixed(0)} tokens/s` : "";
  return [
    rate,
    ttftMs === undefined ? "" : `first token after ${duration(ttftMs)}`,
    tokens === undefined ? "" : counted(tokens, "token"),
    { length: "cut at its limit of tokens", stopped: "stopped" }[end] ?? "",
    model ?? "",
  ].filter(Boolean).join(" · ");
}

/** Drops a message and all after it, puts another in its place if there is one, and has the conversation answered. */
function replaceFrom(message, other) {
  messages.splice(messages.indexOf(message), Infinity, ...(other ? [other] : []));
  show();
  prompt.focus();
  answer();
}

function show() {
  log.replaceChildren(...messages.map((message) => {
    if (message.role === "user") return questionItem(message);
    const view = new AnswerView(message);
    view.finish();
    return view.item;
  }));
  if (!messages.length) log.append(element("p", { className: "empty" }, "Ask the model something."));
  log.scrollTop = log.scrollHeight;
}

// The reader's side

const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function send() {
  const content = prompt.value.trim();
  if (!content || running) return;
  messages.push({ role: "user", content });
  show();
  prompt.value = "";
  fit();
  keep();
  answer();
}

/** As high as its text, within the limits of the stylesheet. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function openSettings(isOpen) {
  byId("settings-button").setAttribute("aria-expanded", String(isOpen));
  byId("settings").classList.toggle("open", isOpen);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("settings").addEventListener("change", () => {
  readSchema();
  keep();
});
byId("settings-button").addEventListener("click", (event) => openSettings(event.target.getAttribute("aria-expanded") === "false"));
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  keep();
  show();
  status("The conversation was cleared.");
  prompt.focus();
});

const chosen = recall();
show();
prompt.focus();
loadModels(chosen).catch((error) => status(error.message));
