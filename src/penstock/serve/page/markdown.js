// Markdown as DOM nodes: headings, lists, quotes, tables, code, formulas, bold, italic, links. It makes elements and text, never
// HTML of a string, so whatever a model writes is shown and not run. Each text is read once from left to right.

import { formula } from "./formulas.js";
import { highlight } from "./highlight.js";
import { button, element } from "./shared.js";

const MAX_DEPTH = 8; // Of quotes, lists and emphasis in each other; deeper marks are shown as they are.
// Patterns are read in one go, as a line may be long: no two parts of one that can match the same characters stand side by side.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^(?=[^-]*-)[\s|:-]+$/;
const MAX_LINK_CHARS = 2000;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const FORMULA_ENDS = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
const MAX_FORMULA_LINES = 100; // The end of a formula is looked for in so many lines, so that begun ones cost little.
// An address whose scheme runs nothing, up to the `)` behind it. Brackets in it are in pairs: `Go_(game)`.
const ADDRESS = /^\s*((?:https?:\/\/|mailto:)(?:[^\s()]|\((?:[^\s()]|\([^\s()]*\))*\))*)\s*\)/i;

/** Shows a text that grows: blocks that did not change keep their nodes, and with them what the reader has selected. */
export class MarkdownView {
  constructor(target) {
    this.target = target;
    this.sources = [];
  }

  show(text, isGrowing) {
    // A last `$` may yet turn out to end no formula: `$HOME/$PATH`.
    const blocks = blocksOf((isGrowing ? text.replace(/\$$/, "") : text).split("\n"));
    const sources = blocks.map((block) => block.source);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.target.childNodes.length > same) this.target.lastChild.remove();
    this.target.append(...blocks.slice(same).map((block) => Object.assign(block.make(), { dir: "auto" })));
    this.sources = sources;
  }
}

/** The blocks of some lines: `source`, which tells whether one changed, and `make`, which makes its element. */
function blocksOf(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  const add = (end, make) => {
    blocks.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  };
  const endOf = (from, belongs) => {
    let end = from;
    while (end < lines.length && belongs(lines[end], end)) end += 1;
    return end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const begin = at;
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const formulaEnd = FORMULA.test(line) ? endOfFormula(lines, at) : 0;
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      const mark = fence[1];
      const isEnd = (other) => other.trim().length >= mark.length && other.trim() === mark[0].repeat(other.trim().length);
      const end = endOf(at + 1, (other) => !isEnd(other));
      const language = fence[2].trim().split(/\s/)[0];
      add(Math.min(end + 1, lines.length), () => codeBlock(lines.slice(begin + 1, end).join("\n"), language, end < lines.length));
    } else if (formulaEnd) {
      add(formulaEnd, () => blockFormula(lines.slice(begin, formulaEnd).join("\n").trim()));
    } else if (heading) {
      // A level lower: the page has an h1 of its own.
      add(at + 1, () => element(`h${Math.min(6, heading[1].length + 1)}`, {}, ...inline(heading[2].trimEnd())));
    } else if (RULE.test(line)) {
      add(at + 1, () => element("hr"));
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const end = endOf(at, (other) => QUOTE.test(other));
      add(end, () => element("blockquote", {}, ...nodesOf(lines.slice(begin, end).map((one) => one.replace(QUOTE, "")), depth)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const end = endOfList(lines, at);
      add(end, () => list(lines.slice(begin, end), depth));
    } else if (line.includes("|") && lines[at + 1]?.includes("|") && TABLE_RULE.test(lines[at + 1])) {
      const end = endOf(at + 2, (other) => other.includes("|"));
      add(end, () => table(lines.slice(begin, end)));
    } else {
      const end = endOf(at + 1, (other) => isParagraph(other, depth));
      add(end, () => element("p", {}, ...inline(lines.slice(begin, end).join("\n").trim())));
    }
  }
  return blocks;
}

const nodesOf = (lines, depth) => blocksOf(lines, depth + 1).map((block) => block.make());

const isParagraph = (line, depth) =>
  line.trim() && !FENCE.test(line) && !FORMULA.test(line) && !HEADING.test(line) && !RULE.test(line)
  && (depth >= MAX_DEPTH || !(QUOTE.test(line) || ITEM.test(line)));

/** The index after the last line of the formula that begins at `at`, or 0 if it does not end, or other text follows it. */
function endOfFormula(lines, at) {
  const mark = FORMULA.exec(lines[at])[1];
  const close = FORMULA_ENDS[mark];
  for (let next = at; next < Math.min(lines.length, at + MAX_FORMULA_LINES); next += 1) {
    const end = lines[next].indexOf(close, next === at ? lines[at].indexOf(mark) + mark.length : 0);
    if (end >= 0) return lines[next].slice(end + close.length).trim() ? 0 : next + 1;
  }
  return 0;
}

const blockFormula = (source) => formula(source.slice(2, -2), source, true);

/** Where the list that begins at `at` ends: before a line that is neither an item nor indented behind one. */
function endOfList(lines, at) {
  const indent = ITEM.exec(lines[at])[1].length;
  const isOrdered = /\d/.test(ITEM.exec(lines[at])[2]);
  let end = at + 1;
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) continue;
    const item = ITEM.exec(line);
    const depth = line.length - line.trimStart().length;
    if (depth <= indent && !(item && /\d/.test(item[2]) === isOrdered && !RULE.test(line))) {
      if (item || !lines[next - 1].trim() || !isParagraph(line, 0)) break;
    }
    end = next + 1;
  }
  return end;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.slice(Math.min(first[0].length, line.length - line.trimStart().length)));
  }
  const made = items.map((item) => {
    const nodes = nodesOf(item, depth);
    // A tight item is text, not a paragraph with its margins.
    const isTight = nodes[0]?.tagName === "P" && item.filter((line) => !line.trim()).length === 0;
    return element("li", {}, ...(isTight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
  });
  return element(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(first[2], 10) } : {}, ...made);
}

function table(lines) {
  // `\|` is part of a cell, in code too.
  const parts = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/);
  const cells = (line) => parts(line).map((cell) => cell.replaceAll("\\|", "|").trim());
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  const made = element("table", {}, element("thead", {}, row(lines[0], "th")), body);
  return element("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" }, made);
}

/** A block of code with a button that copies it. It gets its colours once it is complete. */
export function codeBlock(text, language = "", isComplete = false) {
  const code = element("code", {}, text);
  if (isComplete) highlight(code, language);
  return element("figure", { className: "code" },
    element("figcaption", {}, element("span", {}, language || "text"), button("Copy", (event) => copy(text, event.target))),
    element("pre", { tabIndex: 0 }, code));
}

/** Puts a text into the clipboard, and says so on the button "Copy" for a moment. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text); // There is none without HTTPS, but on this machine.
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/** The nodes of a text within a block. */
function inline(text, depth = 0) {
  const nodes = [];
  const search = new Search(text);
  let plain = "";
  let at = 0;
  const flush = () => {
    plain.split("\n").forEach((line, index) => {
      if (index) nodes.push(element("br"));
      if (line) nodes.push(line);
    });
    plain = "";
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && !(text.slice(at, at + 2) in FORMULA_ENDS) && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const find = depth < MAX_DEPTH || char === "`" ? FINDERS[char] : undefined;
    const found = find?.(text, at, search, depth);
    if (found) {
      flush();
      nodes.push(found.node);
      at = found.end;
    } else {
      const length = find ? markAt(text, at).length : 1;
      plain += text.slice(at, at + length);
      at += length;
    }
  }
  flush();
  return nodes;
}

/** Says where a mark comes next. It looks at each part of the text once, as long as it is asked from left to right. */
class Search {
  constructor(text) {
    this.text = text;
    this.found = new Map();
  }

  next(mark, from) {
    let at = this.found.get(mark);
    if (at === undefined || (at >= 0 && at < from)) {
      at = this.text.indexOf(mark, from);
      this.found.set(mark, at);
    }
    return at;
  }
}

/** The same character as often as it stands here. */
function markAt(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return text.slice(at, end);
}

function codeAt(text, at, search) {
  const mark = markAt(text, at);
  const end = search.next(mark, at + mark.length);
  if (end < 0 || text[end + mark.length] === "`") return null;
  const code = text.slice(at + mark.length, end);
  return { node: element("code", {}, code.replace(/^ (.*) $/s, "$1")), end: end + mark.length };
}

function emphasisAt(text, at, search, depth) {
  const mark = markAt(text, at).slice(0, 2);
  const from = at + mark.length;
  const isInWord = (char) => mark[0] === "_" && /\w/.test(char ?? " ");
  if (!(mark in MARKS) || isInWord(text[at - 1]) || !/\S/.test(text[from] ?? " ")) return null;
  let end = search.next(mark, from);
  while (mark.length === 1 && end >= 0 && text[end + 1] === mark) {
    end = search.next(mark, end + markAt(text, end).length); // `*a **b** c*`: a double mark is no end of a single one.
  }
  if (mark.length === 2 && end >= 0 && text[end + 2] === mark[0] && text.slice(from, end).includes(mark[0])) {
    end += 1; // `***a***` and `**a *b***`: the first of three ends what is within.
  }
  if (end <= from || isInWord(text[end + mark.length]) || !/\S/.test(text[end - 1])) return null;
  return { node: element(MARKS[mark], {}, ...inline(text.slice(from, end), depth + 1)), end: end + mark.length };
}

function linkAt(text, at, search, depth) {
  const middle = search.next("](", at + 1);
  const found = middle < 0 ? null : ADDRESS.exec(text.slice(middle + 2, at + MAX_LINK_CHARS));
  const label = found ? text.slice(at + 1, middle) : "[";
  if (label.includes("[")) return null;
  const [whole, href] = found;
  const node = element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...inline(label, depth + 1));
  return { node, end: middle + 2 + whole.length };
}

/** `\(a\)` and `$a$` within a line, `\[a\]` and `$$a$$` on one of their own. Amounts of money are no formulas: `$5 or $6`. */
function formulaAt(text, at, search) {
  const double = text.slice(at, at + 2);
  const mark = double in FORMULA_ENDS ? double : text[at];
  const close = FORMULA_ENDS[mark];
  const from = at + mark.length;
  const end = close ? search.next(close, from) : -1;
  const tex = text.slice(from, end);
  const isMoney = mark === "$" && (/^\s|[\s\\]$/.test(tex) || /[\w$]/.test(text[at - 1] ?? " ") || /[\w$]/.test(text[end + 1] ?? " "));
  if (end <= from || isMoney) return null;
  const made = formula(tex, text.slice(at, end + close.length), mark === "$$" || mark === "\\[");
  return { node: made, end: end + close.length };
}

const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const FINDERS = { "$": formulaAt, "\\": formulaAt, "`": codeAt, "[": linkAt, "*": emphasisAt, _: emphasisAt, "~": emphasisAt };
