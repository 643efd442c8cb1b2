// The chat: the conversation that is open, and the answers that are on their way, at most one for each conversation.

import { AnswerView, following, isSend, questionItem } from "./answers.js";
import { branch, conversations, followOtherTabs, keep, newConversation, pathOf } from "./conversations.js";
import { showList } from "./list.js";
import { loadModels, recallSettings, settingsOfRequest, systemMessages, unfold } from "./settings.js";
import { button, byId, counted, element, newId, ServerError, session } from "./shared.js";
import { stream, tokensOf } from "./stream.js";

const OPEN = "penstock.open"; // The id of this tab's conversation, in sessionStorage.
const KEEP_MS = 1000; // A growing answer is kept so often, in case the browser ends without saying so.
const MAX_ANSWERS = 5; // On their way in all tabs: a browser has six connections to a server, and one has to stay free.
const SILENT_MS = 70_000; // A tab that has not kept its answer for so long is gone. Browsers let a hidden tab act once a minute.

let open = newConversation();
const running = new Map(); // Conversation -> `{message, view, controller}`.
let elsewhere = null; // The view of an answer of `open` that is on its way in another tab.
let looking = null; // The timer of `lookAgain`.

const log = byId("log");
const prompt = byId("prompt");
const status = (text) => { byId("status").textContent = text; };

const list = {
  keep: keepOrTell,
  openId: () => open.id,
  isAnswering: (conversation) => running.has(conversation) || isElsewhere(pathOf(conversation).at(-1)),
  open: (conversation) => {
    show(conversation);
    unfold("list", false);
  },
  gone: (conversation) => {
    end(conversation);
    if (conversation.id === open.id) show(newConversation());
    else showList(list);
    status("The conversation was deleted.");
    prompt.focus();
  },
};

/** Whether an answer is on its way in another tab, which keeps it as it grows. */
const isElsewhere = (message) => Date.now() - message?.facts?.aliveMs < SILENT_MS;

/** End the answer of a conversation that is gone. */
function end(conversation) {
  running.get(conversation)?.controller.abort();
  running.delete(conversation);
}

const NO_ROOM = "The browser has no room to keep this conversation. Export it, or delete others.";

function keepOrTell(conversation) {
  const isKept = keep(conversation);
  if (!isKept) status(NO_ROOM);
  if (conversation === open) session.setItem(OPEN, open.id); // A copy has another one.
  return isKept;
}

// The answer

/**
 * The fields of a request that has a message answered, or the answer that is the last message continued. Questions are joined where
 * the answer between them has no text: many templates refuse two messages of one role in a row.
 */
function bodyOf(settings, path) {
  const messages = systemMessages();
  for (const { role, content } of path.filter((message) => message.content)) {
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  return { ...settings, messages };
}

/** The messages up to this one, which is shown. */
function pathTo(message) {
  const path = pathOf(open);
  return path.slice(0, path.indexOf(message) + 1);
}

/** Have a question of the open conversation answered, beside the answers that it has. An empty one that nothing followed gives way. */
function answer(question, settings) {
  question.next = question.next.filter(({ content, reasoning, toolCalls, next }) => content || reasoning || toolCalls.length || next.length);
  const message = branch(question, { role: "assistant", content: "", reasoning: "", toolCalls: [] });
  run(question, message, bodyOf(settings, pathTo(question)));
}

/** Have the server go on with an answer of the open conversation that is not complete. */
function goOn(question, message, settings) {
  delete message.error;
  const body = { ...bodyOf(settings, pathTo(message)), continue_final_message: true };
  body.messages.at(-1).reasoning_content = message.reasoning || undefined; // Not in other requests: upstreams may refuse it.
  run(question, message, body);
}

async function run(question, message, body) {
  const conversation = open;
  // What is kept from now on says so, for whoever finds it: the page removes the word when the answer ends.
  const isJson = message.facts?.isJson ?? Boolean(body.response_format); // It stays what it began as.
  message.facts = { requestId: `page-${newId()}`, model: body.model, isJson, end: "interrupted", aliveMs: Date.now() };
  const view = viewOf(message, question);
  const one = { message, view, controller: new AbortController() };
  running.set(conversation, one);
  keepOrTell(conversation);
  show(conversation);
  log.scrollTop = log.scrollHeight;
  status("The answer is on its way.");
  const ended = await outcome(body, one, conversation);
  if (running.get(conversation) !== one) return; // The conversation was deleted meanwhile.
  running.delete(conversation);
  view.finish();
  // The model may have turned out to be an encoder, or the list did not come. If it does not now, the answer says why already.
  if (message.error || !byId("model").value) loadModels().catch(() => {});
  const isKept = keepOrTell(conversation);
  showList(list);
  if (conversation.id !== open.id) return;
  showRunning();
  if (isKept) status(ended);
}

/** Stream an answer, and note in the message how it ended. Returns words for the status. */
async function outcome(body, { message, view, controller }, conversation) {
  const { facts } = message;
  const keeping = setInterval(() => keepRunning(conversation), KEEP_MS);
  const changed = () => {
    view.change();
    if (Date.now() - facts.aliveMs > 2 * KEEP_MS) keepRunning(conversation); // Browsers slow the timers of hidden pages.
  };
  try {
    await stream(body, message, { changed, waits: (text) => view.wait(text) }, controller.signal);
    if (facts.end === "interrupted") delete facts.end;
    return `The answer is complete: ${counted(facts.tokens ?? 0, "token")}.`;
  } catch (error) {
    if (error.name === "AbortError") {
      facts.end = "stopped";
      if (message.content) countStopped(message, view, conversation);
      return "Stopped.";
    }
    const isOfServer = error instanceof ServerError && error.status > 0;
    if (isOfServer) delete facts.end; // Else it was interrupted: the connection was lost, or the reader leaves the page.
    const reason = error instanceof ServerError ? error.message : "The connection was lost.";
    if (isOfServer || !message.content) message.error = reason;
    message.retryAfterMs = error.retryAfterMs ?? null;
    if (!message.error) return reason;
    return message.content ? "The answer is not complete." : "There is no answer.";
  } finally {
    clearInterval(keeping);
    delete facts.aliveMs;
  }
}

/** Add the number of tokens to an answer that was stopped. The server alone knows it, and may not answer. */
async function countStopped({ facts }, view, conversation) {
  facts.tokens = await tokensOf(facts.requestId);
  if (!facts.tokens) return;
  view.drawFoot();
  if (conversations.get(conversation.id) === conversation) keepOrTell(conversation); // Else it was deleted, or kept by another tab.
}

/** Keep the conversation of an answer that is on its way. One that was deleted has none. */
function keepRunning(conversation) {
  const one = running.get(conversation);
  if (!one) return;
  one.message.facts.aliveMs = Date.now();
  keepOrTell(conversation);
}

// What is shown

/** Show a conversation, and the list beside it. */
function show(conversation) {
  const isAnother = conversation.id !== open.id;
  open = conversation;
  clearTimeout(looking);
  elsewhere = null;
  session.setItem(OPEN, open.id);
  log.replaceChildren(...pathOf(open).map(itemOf));
  if (!open.next.length) log.append(element("p", { className: "empty" }, "Ask the model something."));
  if (isAnother) {
    status("");
    log.scrollTop = log.scrollHeight;
  }
  showRunning();
  showList(list);
}

/** Draw by how much an answer grew in another tab. Returns false if the conversation has to be shown anew. */
function grow(conversation) {
  const message = pathOf(conversation).at(-1);
  if (!isElsewhere(message) || elsewhere?.message.facts.requestId !== message.facts.requestId) return false;
  Object.assign(elsewhere.message, message);
  conversations.set(open.id, Object.assign(open, { title: conversation.title, changedMs: conversation.changedMs }));
  elsewhere.draw();
  awaitOtherTab();
  return true;
}

/** Show the open conversation anew when the tab that answers it is gone. */
function awaitOtherTab() {
  lookAgain(elsewhere.message.facts.aliveMs + SILENT_MS - Date.now());
}

function lookAgain(afterMs) {
  clearTimeout(looking);
  looking = setTimeout(() => follow(open, conversations.get(open.id)), afterMs);
}

function showRunning() {
  const isRunning = running.has(open);
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  log.setAttribute("aria-busy", String(list.isAnswering(open)));
}

function itemOf(message, index, path) {
  const parent = path[index - 1] ?? open;
  if (message.role === "user") {
    return questionItem(message, {
      edit: (content) => begin((settings) => ask(parent, content, settings)),
      versions: () => versions(message, parent),
    });
  }
  const one = running.get(open);
  if (one?.message === message) return one.view.item;
  const view = viewOf(message, parent);
  if (isElsewhere(message)) {
    elsewhere = view;
    view.foot.append(element("p", { className: "note" }, "Is being answered in another tab."));
    awaitOtherTab();
  } else view.finish();
  return view.item;
}

function viewOf(message, question) {
  const view = new AnswerView(message, {
    again: () => begin((settings) => answer(question, settings)),
    goOn: () => begin((settings) => goOn(question, message, settings)),
    versions: () => versions(message, question),
  });
  if (message.content) view.draw();
  return view;
}

/** Where a message has other versions: which one is shown, and buttons for the one before and after. */
function versions(message, parent) {
  const all = parent.next;
  if (all.length < 2) return [];
  const at = all.indexOf(message);
  const turn = (text, label, other) => button(text, () => {
    parent.chosen = other;
    keepOrTell(open);
    show(open);
    const item = log.children[pathOf(open).indexOf(all[other])];
    (item.querySelector(`[aria-label="${label}"]:enabled`) ?? item.querySelector(".versions :enabled"))?.focus();
  }, { "aria-label": label, disabled: !(other in all) });
  return [element("span", { className: "versions", role: "group", "aria-label": `Version ${at + 1} of ${all.length}` },
    turn("‹", "Version before", at - 1), `${at + 1}/${all.length}`, turn("›", "Version after", at + 1))];
}

// The reader's side

/** Begin an answer in the open conversation, unless others are on their way, or a setting is wrong. Returns whether it began. */
function begin(how) {
  if (running.has(open)) {
    status("An answer is on its way. Stop it first.");
    return false;
  }
  if ([...conversations.values()].filter(list.isAnswering).length >= MAX_ANSWERS) {
    status(`${MAX_ANSWERS} answers are on their way. Wait for one, or stop one.`);
    return false;
  }
  const settings = settingsOfRequest();
  if (!settings) return false;
  prompt.focus();
  how(settings);
  return true;
}

/** Ask something after a message of the open conversation, or at its beginning. */
function ask(parent, content, settings) {
  answer(branch(parent, { role: "user", content }), settings);
}

function send() {
  const content = prompt.value.trim();
  if (!content || !begin((settings) => ask(pathOf(open).at(-1) ?? open, content, settings))) return;
  prompt.value = "";
  fit();
}

/** As high as its text, within the limits of the stylesheet. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

const stop = () => running.get(open)?.controller.abort();

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
  stop();
  prompt.focus();
});
document.addEventListener("keydown", ({ key, isComposing, target }) => {
  const isOfOther = byId("chat-view").hidden || target.closest("dialog, #search, select, form:not(#composer, #settings)"); // Escape closes or clears it.
  if (key === "Escape" && !isComposing && !isOfOther) stop();
});
byId("new").addEventListener("click", () => {
  list.open(newConversation());
  prompt.focus();
});
byId("search").addEventListener("input", () => showList(list));
addEventListener("pagehide", () => {
  for (const [conversation, { message }] of running) {
    delete message.facts.aliveMs;
    keepOrTell(conversation);
  }
});
followOtherTabs((conversation) => running.has(conversation), follow);

/** Show what another tab has made of a conversation. */
function follow(before, now) {
  if (!now) end(before);
  const isOpen = (now ?? before)?.id === open.id;
  if (isOpen && now && grow(now)) return;
  const edit = log.querySelector(".edit textarea");
  if (isOpen && now && edit) lookAgain(KEEP_MS); // Until the edit is closed.
  if (!isOpen || (now && edit)) {
    const isGrowing = before && now && list.isAnswering(before) && list.isAnswering(now);
    if (!isGrowing) showList(list); // Else the list would lose the focus each second.
    return;
  }
  following(() => show(now ?? newConversation()));
  if (!edit || edit.value === edit.defaultValue) return;
  prompt.value = [prompt.value, edit.value].filter(Boolean).join("\n\n"); // An edit outlives its conversation.
  fit();
}

show(conversations.get(session.getItem(OPEN)) ?? open);
log.scrollTop = log.scrollHeight;
prompt.focus();
recallSettings().catch((error) => status(error.message));
