// Formulas in LaTeX as MathML, by Temml in vendor/temml, which is loaded when the first formula is shown. The browser draws MathML
// itself, with a font of the system, and it can be read aloud.

import { element } from "./shared.js";

const MAX_CHARS = 5000;
const OPTIONS = {
  throwOnError: true,
  trust: false, // No links, pictures, classes or styles.
  maxSize: [20, 300], // In em and points: a rule or a space can't cover the page.
  maxExpand: 1000, // Macros that call themselves end.
};

/** An element that shows the source of a formula until the formula is made, and for good if it is wrong. */
export function formula(tex, source, isDisplay) {
  const made = element("span", { className: isDisplay ? "formula display" : "formula" }, source);
  if (isDisplay) Object.assign(made, { tabIndex: 0, role: "group", ariaLabel: "Formula" }); // It scrolls, by the keyboard, too.
  if (tex.length <= MAX_CHARS) draw(made, tex, isDisplay);
  return made;
}

async function draw(made, tex, isDisplay) {
  const drawn = element("span");
  try {
    const { default: library } = await import("./vendor/temml/temml.min.js");
    library.render(tex, drawn, { ...OPTIONS, displayMode: isDisplay });
    made.replaceChildren(...drawn.childNodes);
  } catch (error) {
    made.title = error.message;
  }
}
