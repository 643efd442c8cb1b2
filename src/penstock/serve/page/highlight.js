// Colours for code, by highlight.js in vendor/highlight. It and the grammar of a language are loaded when the first such block
// is shown. highlight.js answers with HTML as a string, which the page's policy keeps out: elements are made of it here.

import { element } from "./shared.js";

const MAX_CHARS = 10_000; // Longer code stays plain: grammars are patterns, and for odd text their time grows with its square.

/** Names of languages by the grammar that colours them. */
const NAMES = {
  bash: "bash sh zsh", cpp: "cpp c++ c h hpp cc", csharp: "csharp cs c#", diff: "diff patch", dockerfile: "dockerfile docker",
  go: "go golang", ini: "ini toml conf", java: "java", json: "json jsonl jsonc", makefile: "makefile make mk", python: "python py python3",
  rust: "rust rs", shell: "shell console shellsession", sql: "sql sqlite postgresql mysql",
  typescript: "typescript ts javascript js jsx tsx mjs", xml: "xml html svg xhtml", yaml: "yaml yml",
};
const GRAMMARS = new Map(Object.entries(NAMES).flatMap(([grammar, names]) => names.split(" ").map((name) => [name, grammar])));

/** Colour the text of an element in place, if its language is known. */
export async function highlight(target, language) {
  const grammar = GRAMMARS.get(language.toLowerCase());
  const text = target.textContent;
  if (!grammar || text.length > MAX_CHARS) return;
  const { default: library } = await import("./vendor/highlight/core.min.js");
  if (!library.getLanguage(grammar)) library.registerLanguage(grammar, (await import(`./vendor/highlight/${grammar}.min.js`)).default);
  const coloured = elementsOf(library.highlight(text, { language: grammar, ignoreIllegals: true }).value);
  if (coloured.textContent === text) target.replaceChildren(coloured);
}

const ESCAPES = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'", "&amp;": "&" };

/** What highlight.js writes: spans with a class, text, and the escapes above. */
function elementsOf(html) {
  const open = [document.createDocumentFragment()];
  for (const [piece, className] of html.matchAll(/<span class="([^"]*)">|<\/span>|[^<]+/g)) {
    if (className !== undefined) {
      const span = element("span", { className });
      open.at(-1).append(span);
      open.push(span);
    } else if (piece === "</span>") {
      open.pop();
    } else {
      open.at(-1).append(piece.replace(/&(?:lt|gt|quot|#x27|amp);/g, (escape) => ESCAPES[escape]));
    }
  }
  return open[0];
}
