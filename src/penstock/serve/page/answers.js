// An answer while it grows and after it: its text, reasoning and calls, its figures, and what can be done with it.

import { codeBlock, copy, MarkdownView } from "./markdown.js";
import { button, byId, counted, duration, element } from "./shared.js";
import { showWhy } from "./why.js";

const log = byId("log");
const CAN_GO_ON = ["length", "stopped", "interrupted"];

/** Change the log, and keep its end in sight if it was. */
export function following(change) {
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

export class AnswerView {
  /** `does` has what the reader can do: `again()`, `goOn()`, and `versions()`, the elements that switch between versions. */
  constructor(message, does) {
    this.message = message;
    this.does = does;
    this.text = element("div", { className: message.facts.isJson ? "text json" : "text" });
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
    this.isGrowing = true; // Until finished: a frame that was asked for before may draw after that.
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
    following(() => this.drawText());
  }

  drawText() {
    const { content, reasoning, toolCalls, facts } = this.message;
    this.note.hidden = true;
    if (!facts.isJson) this.markdown.show(content, this.isGrowing);
    else if (content) this.text.replaceChildren(codeBlock(content, "json", !this.isGrowing));
    this.reasoning.hidden = !reasoning;
    this.reasoningMarkdown.show(reasoning ?? "", this.isGrowing);
    this.calls.replaceChildren(...toolCalls.filter(Boolean).map(({ name, arguments: given }) => codeBlock(given, `Call of ${name}`)));
  }

  /** Draw it as one that does not grow any more, with its figures and buttons. */
  finish() {
    this.isGrowing = false;
    following(() => {
      this.drawText();
      this.drawFoot();
    });
  }

  drawFoot() {
    const { error, retryAfterMs, content, facts } = this.message;
    const wait = retryAfterMs ? ` The server has room in ${duration(retryAfterMs)}.` : "";
    const told = error ? [element("p", { className: "error" }, error + wait)] : [];
    const panel = element("div", { className: "why", hidden: true });
    const why = button("Why was this slow?", () => {
      panel.hidden = !panel.hidden;
      why.setAttribute("aria-expanded", String(!panel.hidden));
      if (!panel.hidden) showWhy(panel, facts.requestId, facts.ttftMs ?? null).then(() => panel.scrollIntoView({ block: "nearest" }));
    }, { "aria-expanded": "false" });
    const buttons = [
      why,
      ...(content ? [button("Copy", (event) => copy(content, event.target))] : []),
      ...(content && (error || CAN_GO_ON.includes(facts.end)) ? [button("Continue", this.does.goOn)] : []),
      button(content ? "Regenerate" : "Try again", this.does.again),
      ...this.does.versions(),
    ];
    this.foot.replaceChildren(...told, element("p", { className: "facts-line" }, factsLine(facts)),
      element("p", { className: "tools" }, ...buttons), panel);
  }
}

const ENDS = { length: "cut at its limit of tokens", stopped: "stopped", interrupted: "interrupted" };

function factsLine({ tokens, ttftMs, decodeMs, laterShare = 1, model, end }) {
  const rate = tokens > 1 && decodeMs > 0 ? `${((tokens * laterShare * 1000) / decodeMs).toFixed(0)} tokens/s` : "";
  return [
    rate,
    ttftMs === undefined ? "" : `first token after ${duration(ttftMs)}`,
    tokens === undefined ? "" : counted(tokens, "token"),
    ENDS[end] ?? "",
    model ?? "",
  ].filter(Boolean).join(" · ");
}

/** A message of the reader, which can be edited. `does` has `edit(text)` and `versions()`. */
export function questionItem(message, does) {
  const text = element("div", { className: "text", dir: "auto" }, message.content);
  const edit = button("Edit", () => {
    const texts = { value: message.content, defaultValue: message.content };
    const field = element("textarea", { ...texts, "aria-label": "Edited message", rows: 3, dir: "auto" });
    const form = element("form", { className: "edit" }, field,
      element("button", { type: "submit", className: "strong" }, "Send again"), button("Cancel", close));
    function close() {
      form.replaceWith(text, tools);
      edit.focus();
    }
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) does.edit(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (isSend(event)) form.requestSubmit();
    });
    tools.remove();
    text.replaceWith(form);
    field.focus();
  });
  const tools = element("p", { className: "tools" }, edit, ...does.versions());
  return element("article", { className: "question", "aria-label": "You" }, text, tools);
}

export const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
