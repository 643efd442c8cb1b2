// The conversations that this browser keeps: one entry of localStorage for each. The chat and the list use it.
//
// A conversation is a tree. Each message has the messages that were sent after it in `next`, and `chosen` is the index of the one
// that is shown. So an edited message, or an answer that was made anew, stands beside the old one, which keeps what followed it.

import { local, newId, recall, store } from "./shared.js";

const PREFIX = "penstock.conversation.";
const MAX_TITLE_CHARS = 60;

/** Conversations by id: `{id, title, changedMs, next, chosen}`. */
export const conversations = new Map();

for (const key of Object.keys(local)) {
  const kept = key.startsWith(PREFIX) ? recall(key) : null; // Null, too, if something else wrote under our name.
  if (kept?.id) conversations.set(kept.id, kept);
}

/** A conversation without messages. It is not kept before it has some. */
export function newConversation() {
  return { id: newId(), title: "", changedMs: Date.now(), next: [], chosen: 0 };
}

/** Keep a conversation, as a copy if another tab kept it since it was read here. Returns false if the browser has no room for it. */
export function keep(conversation) {
  const kept = recall(PREFIX + conversation.id);
  if (kept?.id && kept.changedMs !== conversation.changedMs) {
    conversations.set(kept.id, kept);
    conversation.title = `${titleOf(conversation)} (copy)`;
    conversation.id = newId();
  }
  conversations.set(conversation.id, conversation);
  const changedMs = Date.now();
  const isKept = store(PREFIX + conversation.id, JSON.stringify({ ...conversation, changedMs }));
  if (isKept) conversation.changedMs = changedMs;
  return isKept;
}

export function forget(conversation) {
  conversations.delete(conversation.id);
  local.removeItem(PREFIX + conversation.id);
}

/** Calls `changed(before, now)` when another tab has kept or deleted a conversation. It is not read while `isGrowing` here. */
export function followOtherTabs(isGrowing, changed) {
  addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    const before = conversations.get(id);
    const now = recall(key);
    if (now && isGrowing(before)) return;
    if (now) conversations.set(id, now);
    else conversations.delete(id);
    changed(before, now);
  });
}

// The tree

/** The messages that are shown, the first one first. */
export function pathOf(conversation) {
  const path = [];
  for (let at = conversation; at.next.length; path.push(at)) at = at.next[at.chosen];
  return path;
}

/** Add a message after `parent`, beside those that are there already, and show it. */
export function branch(parent, message) {
  parent.chosen = parent.next.push({ ...message, next: [], chosen: 0 }) - 1;
  return parent.next[parent.chosen];
}

// The list

/** The title that the reader gave, or else the beginning of the first message. */
export function titleOf(conversation) {
  const begin = pathOf(conversation)[0]?.content.replace(/\s+/g, " ").trim() ?? "";
  return conversation.title || (begin.length > MAX_TITLE_CHARS ? `${begin.slice(0, MAX_TITLE_CHARS)}…` : begin) || "Untitled";
}

/** Conversations whose title or messages, of any branch, contain a text. The last changed one comes first. */
export function found(text) {
  const wanted = text.trim().toLowerCase();
  const has = (node) => node.content?.toLowerCase().includes(wanted) || node.next.some(has);
  return [...conversations.values()]
    .filter((one) => !wanted || titleOf(one).toLowerCase().includes(wanted) || has(one))
    .sort((a, b) => b.changedMs - a.changedMs);
}

/** The shown messages of a conversation as Markdown. */
export function asMarkdown(conversation) {
  const parts = pathOf(conversation).map(({ role, content }) => `## ${role === "user" ? "You" : "Answer"}\n\n${content}\n`);
  return [`# ${titleOf(conversation)}\n`, ...parts].join("\n");
}
