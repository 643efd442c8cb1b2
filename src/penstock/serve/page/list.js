// The list of conversations: a search, and for the open one its name, its export and its end.

import { asMarkdown, conversations, forget, found, titleOf } from "./conversations.js";
import { button, byId, element } from "./shared.js";

/** Draw the list. `chat` has what the list calls: `openId()`, and `open`, `keep`, `isAnswering` and `gone` of a conversation. */
export function showList(chat) {
  if (byId("conversations").querySelector("form")?.dataset.id === chat.openId()) return; // It is being renamed.
  const wanted = byId("search").value;
  const listed = found(wanted);
  const hadFocus = byId("conversations").contains(document.activeElement);
  byId("conversations").replaceChildren(...listed.map((one) => item(one, chat)));
  byId("none-found").textContent = listed.length ? "" : wanted ? "No conversation contains this." : "Conversations are listed here.";
  if (hadFocus) byId("conversations").querySelector("[aria-current]")?.focus();
}

function item(conversation, chat) {
  const isOpen = conversation.id === chat.openId();
  const title = titleOf(conversation);
  const open = () => chat.open(conversations.get(conversation.id)); // Another tab may have kept it since.
  const name = button(title, open, { className: "title", title, ...(isOpen ? { "aria-current": "true" } : {}) });
  const state = chat.isAnswering(conversation) ? [element("span", { className: "note" }, "is being answered")] : [];
  return element("li", {}, name, ...state, ...(isOpen ? [tools(conversation, chat, name)] : []));
}

function tools(conversation, chat, name) {
  const remove = button("Delete", () => {
    if (remove.textContent === "Delete") {
      remove.textContent = "Really delete";
      return;
    }
    forget(conversation);
    chat.gone(conversation);
  });
  remove.addEventListener("blur", () => { remove.textContent = "Delete"; });
  const file = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  return element("p", { className: "tools" },
    button("Rename", () => rename(conversation, chat, name)),
    button("Markdown", () => save(`${file}.md`, asMarkdown(conversation), "text/markdown"), { "aria-label": "Export as Markdown" }),
    button("JSON", () => save(`${file}.json`, JSON.stringify(conversation, null, 2), "application/json"), { "aria-label": "Export as JSON" }),
    remove);
}

function rename(conversation, chat, name) {
  const field = element("input", { value: titleOf(conversation), "aria-label": "Name of the conversation" });
  const form = element("form", { "data-id": conversation.id }, field);
  const close = () => {
    form.remove(); // Before the list is drawn: taking the focus away would submit again.
    showList(chat);
    byId("conversations").querySelector("[aria-current]")?.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const latest = conversations.get(conversation.id); // Another tab may have kept it since.
    latest.title = field.value.trim();
    chat.keep(latest);
    close();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  name.replaceWith(form);
  field.select();
}

/** Hand a text to the browser as a file to be saved. */
function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
