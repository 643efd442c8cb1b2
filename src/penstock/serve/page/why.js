// "Why was this slow?": the explanation of a request (`GET /v1/requests/{id}`) as sentences, as bars and as numbers.

import { askJson, count, counted, duration, element, share } from "./shared.js";

const WAITS = {
  model: "Its model was loaded",
  intake: "Its prompt was tokenised, a step ended",
  rows: "As many requests ran as may",
  tokens: "Other prompts took the tokens of the step",
  memory: "The KV cache was full",
  prefix: "Another request computed the same beginning",
  adapter: "Its adapter was read",
  loading: "Its beginning came from the tier below the cache",
  gate: "Its batch was not complete",
  order: "Others went first",
  background: "Other requests left it no room",
  step: "The next step",
};
const REMEDIES = {
  model: "keep_loaded, --memory",
  rows: "--max-num-seqs",
  tokens: "--slo-itl, --max-long-partial-prefills",
  memory: "--kv-cache-memory",
  adapter: "--max-loras, --max-cpu-loras",
  gate: "--batching",
  order: "--policy",
  background: "--background-share",
};
const PREFIX_ENDS = {
  differs: "then the cache goes on with another token",
  "answer differs": "then the history differs from an answer: it came back without its reasoning, or with other text",
  evicted: "what follows was evicted",
  "no state": "more is cached, but the model's state was not saved there",
  "never seen": "what follows was never seen",
  "different salt or adapter": "what follows is cached under another salt or adapter",
  "caching off": "the prefix cache is off",
};

/** The parts of a request's time in order, `{kind, label, from, to}`, in ms since it came. Pauses lie over the others. */
export function phasesOf(choice) {
  const { queue, prefill, decode } = choice.time_ms;
  const phases = [];
  let at = 0;
  const add = (kind, label, length) => {
    if (length > 0) phases.push({ kind, label, from: at, to: at + length });
    at += length;
  };
  const waited = Object.entries(choice.waited.for_ms);
  for (const [reason, ms] of waited) add("queue", WAITS[reason] ?? `Waited for ${reason}`, ms);
  at = queue;
  add("prefill", "Computed its prompt", prefill);
  add("decode", "Wrote its tokens", decode);
  for (const pause of choice.preemptions) {
    phases.push({ kind: "pause", label: "Lost its place", from: pause.after_ms, to: pause.after_ms + pause.waited_ms });
  }
  return phases;
}

/** Puts phases on a line that begins at `begin` and lasts `length`, both in ms since the request came. */
export function drawPhases(line, phases, begin, length) {
  line.replaceChildren(...phases.flatMap(({ kind, label, from, to }) => {
    const left = Math.max(0, (100 * (from - begin)) / length);
    const right = Math.min(100, (100 * (to - begin)) / length);
    if (right <= 0 || left >= 100) return [];
    const part = element("span", { className: `phase ${kind}`, title: `${label}: ${duration(to - from)}` });
    part.style.left = `${left}%`;
    part.style.width = `${Math.max(0.3, right - left)}%`;
    return [part];
  }));
}

/** Fills a panel with the explanation of a request, or with the reason why there is none. */
export async function showWhy(panel, requestId, seenTtftMs = null) {
  try {
    const told = await askJson(`v1/requests/${encodeURIComponent(requestId)}`);
    panel.replaceChildren(...explanation(told, seenTtftMs));
  } catch (error) {
    panel.replaceChildren(element("p", { className: "error" }, error.message));
  }
}

/** The elements of an explanation. `seenTtftMs`: when this browser saw the first token. */
export function explanation(told, seenTtftMs = null) {
  const choice = told.choices[0];
  const total = Math.max(choice.time_ms.total, 0.001);
  const phases = phasesOf(choice);
  const line = element("div", { className: "line", role: "img" });
  line.setAttribute("aria-label", phases.map(({ label, from, to }) => `${label}: ${duration(to - from)}`).join(". "));
  drawPhases(line, phases, 0, total);
  return [
    element("ul", { className: "sentences" }, ...sentences(told.summary).map((one) => element("li", {}, one))),
    line,
    element("p", { className: "ends" }, element("span", {}, "it came"), element("span", {}, duration(total))),
    table(choice, total),
    facts(told, choice, seenTtftMs),
  ];
}

/** A summary's sentences: each ends with a stop before a space, which no number has. */
const sentences = (summary) => summary.split(/(?<=\.) /);

function table(choice, total) {
  const row = (kind, label, ms, remedy = "") => {
    const bar = element("span", { className: `phase ${kind}` });
    bar.style.width = `${Math.min(100, (100 * ms) / total)}%`;
    return element("tr", {},
      element("th", { scope: "row" }, label, ...(remedy ? [element("code", {}, remedy)] : [])),
      element("td", { className: "number" }, duration(ms)),
      element("td", { className: "number" }, share(ms, total)),
      element("td", { className: "bar-cell", "aria-hidden": "true" }, bar));
  };
  const { prefill, decode, other_models: others } = choice.time_ms;
  const waits = Object.entries(choice.waited.for_ms).sort((a, b) => b[1] - a[1]);
  const paused = choice.preemptions.reduce((sum, pause) => sum + pause.waited_ms, 0);
  return element("table", {},
    element("thead", { className: "unseen" }, element("tr", {}, ...["Part", "Time", "Share"].map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {},
      ...waits.map(([reason, ms]) => row("queue", WAITS[reason] ?? `Waited for ${reason}`, ms, REMEDIES[reason])),
      ...(prefill ? [row("prefill", `Prompt: ${counted(choice.prefill.tokens, "token")} in ${counted(choice.prefill.steps, "step")}`, prefill)] : []),
      ...(decode ? [row("decode", `Tokens: ${counted(choice.decode.steps, "step")} after the first`, decode)] : []),
      ...(choice.decode.with_prompts_ms ? [row("prefill", "of it in steps with prompts of others", choice.decode.with_prompts_ms)] : []),
      ...(paused ? [row("pause", "of it without its place", paused, "--kv-cache-memory")] : []),
      ...(others ? [row("queue", "of it the machine was another model's", others)] : [])));
}

function facts(told, choice, seenTtftMs) {
  const { prefix, batch, longest_gap: gap } = choice;
  const end = prefix && PREFIX_ENDS[prefix.because];
  const rest = told.chosen?.held_ms > 0 ? "the answer was held back until it was chosen or checked"
    : `the rest is ${told.chosen?.route ? "what its route may hold back, " : ""}the network and the browser`;
  const entries = [
    ["Request", told.id],
    ["From the cache", prefix && `${count(prefix.hit_tokens)} of ${counted(choice.prompt_tokens, "token")} of the prompt${end ? `; ${end}` : ""}`],
    ["Requests in its steps", batch.max && `${batch.mean.toFixed(1)} in the mean, ${batch.max} at most`],
    ["Longest gap", gap && `${duration(gap.ms)} between two tokens: ${gap.because}`],
    ["First token", seenTtftMs !== null && `${duration(choice.time_ms.queue + choice.time_ms.prefill)} at the server, ${duration(seenTtftMs)} here: ${rest}`],
  ];
  return element("dl", { className: "facts" }, ...entries.filter(([, value]) => value).flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value)]));
}
