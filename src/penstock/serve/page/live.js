// The live view of the server. It asks once a second, while it is shown: `/load`, `/metrics`, `/kv` and `/v1/requests`.
// Rates and latencies are differences of two readings of the metrics, so the server counts nothing for this page.

import { askJson, askText, byId, count, counted, duration, element, share } from "./shared.js";
import { drawPhases, explanation, phasesOf } from "./why.js";

const PERIOD_MS = 1000;
const WINDOW_S = 30; // Of the latencies.
const CHART_S = 120;
const LANES_MS = 60_000;
const MAX_LANES = 40;
const MAX_JOBS = 5; // The newest ones.
const MAX_CELLS = 2048; // Of the map; a larger pool has several blocks in each.
const CELLS_IN_ROW = 128;
const NUM_OWNERS = 10; // Colours in the stylesheet.

let readings = []; // `{at, metrics}` of the chosen model, the latest last.
let model = ""; // Its name; the first one if the server has none of that name.
let timer = null;
let isAsking = false;

// Asking

const isShown = () => !document.hidden && location.hash === "#live"; // As shell.js shows it.

/** Asks now if somebody looks, and again after a period. */
async function turn() {
  clearTimeout(timer);
  timer = null;
  if (!isShown() || isAsking) return;
  isAsking = true;
  try {
    await look();
    byId("live-status").textContent = "";
    byId("live-again").hidden = true;
    timer = setTimeout(turn, PERIOD_MS);
  } catch (error) {
    byId("live-status").textContent = error.message;
    byId("live-again").hidden = error.status !== 401; // Whoever closed the dialog of the key is not asked again at once.
    if (error.status !== 401) timer = setTimeout(turn, PERIOD_MS);
  }
  isAsking = false;
}

async function look() {
  const all = await askJson("load");
  if (!all.models.length) throw new Error("This key allows no model by its own name, so there is nothing to show.");
  if (!all.models.some(({ name }) => name === model)) {
    model = all.models[0].name;
    readings = [];
  }
  const ofModel = `?model=${encodeURIComponent(model)}`;
  const load = all.models.length > 1 ? await askJson(`load${ofModel}`) : all;
  const [text, requests, pool] = await Promise.all([
    askText("metrics"),
    askJson(`v1/requests?ended=${MAX_LANES}`),
    load.replicas ? null : askJson(`kv${ofModel}`).catch((error) => {
      if (error.status === 503) return null; // The model is not loaded, or its engine is busy for long.
      throw error;
    }),
  ]);
  const metrics = readMetrics(text);
  const reading = { at: performance.now() / 1000, metrics: metrics.get(model) ?? new Map() };
  if (readings.length && hasBegunAnew(latest(), reading)) readings = [];
  readings.push(reading);
  while (readings.length > 1 && readings.at(-1).at - readings[1].at > CHART_S) readings.shift();
  showModels(all, metrics);
  showFigures(load);
  showCharts();
  showReplicas(load.replicas);
  showJobs(/^penstock_jobs /m.test(text) ? (await askJson(`v1/batches?limit=${MAX_JOBS}`).catch(() => ({ data: [] }))).data : []);
  showPool(pool);
  showLanes(requests.data, pool);
  showRefusals();
}

/** Prometheus' text as model -> name -> list of `{labels, value}`. */
function readMetrics(text) {
  const models = new Map();
  for (const line of text.split("\n")) {
    const found = /^penstock_(\w+)\{(.*)\} (\S+)$/.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries(Array.from(found[2].matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g), (one) => [one[1], one[2].replace(/\\(.)/g, "$1")]));
    const names = models.get(labels.model) ?? models.set(labels.model, new Map()).get(labels.model);
    const samples = names.get(found[1]) ?? names.set(found[1], []).get(found[1]);
    samples.push({ labels, value: Number(found[3]) });
  }
  return models;
}

// Numbers from two readings

const total = (reading, name, labels = {}) => (reading.metrics.get(name) ?? [])
  .filter((sample) => Object.entries(labels).every(([label, value]) => sample.labels[label] === value))
  .reduce((sum, { value }) => sum + value, 0);

/** How much a counter grew; 0 when it began anew. */
const grown = (before, now, name, labels) => Math.max(0, total(now, name, labels) - total(before, name, labels));

/** Whether a histogram fell, so the server was started again. */
const hasBegunAnew = (before, now) =>
  [...before.metrics.keys()].some((name) => /_(bucket|count)$/.test(name) && total(now, name) < total(before, name));

/** The quantile of what a histogram in seconds gained, in ms, or null if that is nothing. Straight lines within buckets. */
function quantile(before, now, name, part) {
  const gained = new Map();
  for (const [reading, sign] of [[now, 1], [before, -1]]) {
    for (const { labels, value } of reading.metrics.get(`${name}_bucket`) ?? []) {
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
      gained.set(edge, (gained.get(edge) ?? 0) + sign * value);
    }
  }
  const edges = [...gained.keys()].sort((a, b) => a - b);
  const wanted = part * (gained.get(Infinity) ?? 0);
  if (!wanted) return null;
  let [low, below] = [0, 0];
  for (const edge of edges) {
    const upTo = gained.get(edge);
    if (upTo >= wanted) return 1000 * (edge === Infinity ? low : low + ((edge - low) * (wanted - below)) / (upTo - below));
    [low, below] = [edge, upTo];
  }
  return null;
}

/** Steps between two readings: per second, and the mean of what they computed. */
function stepsBetween(before, now) {
  const seconds = now.at - before.at;
  const steps = grown(before, now, "batch_tokens_count");
  const generated = grown(before, now, "generation_tokens_total");
  // The first token of a request is chosen by the step that ends its prompt, and decodes nothing.
  const decoded = Math.max(0, generated - grown(before, now, "time_to_first_token_seconds_count"));
  const wrong = grown(before, now, "guessed_tokens_total") - grown(before, now, "accepted_tokens_total");
  const computed = grown(before, now, "batch_tokens_sum") - grown(before, now, "padding_tokens_total") - wrong;
  const each = (number) => (steps ? number / steps : 0);
  return {
    perSecond: steps / seconds,
    rows: each(grown(before, now, "batch_size_sum")),
    decoded: each(decoded),
    prompts: each(Math.max(0, computed - decoded)),
    generatedPerSecond: generated / seconds,
    promptsPerSecond: Math.max(0, computed - decoded) / seconds,
  };
}

const latest = () => readings.at(-1);
const since = (seconds) => readings.find(({ at }) => at >= latest().at - seconds - 0.5) ?? readings[0];
const seconds = () => readings.slice(1).map((now, index) => ({ at: now.at, ...stepsBetween(readings[index], now) }));

// What is shown

function showModels({ models, memory }, metrics) {
  const select = byId("live-model");
  const names = models.map(({ name }) => name);
  if (names.join("\n") !== Array.from(select.options, ({ value }) => value).join("\n")) {
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    select.value = model;
  }
  byId("models-panel").hidden = models.length < 2;
  const size = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;
  const rows = models.map((line) => {
    const waiting = line.requests_waiting + line.requests_waiting_for_load;
    const used = Object.values(line.memory_bytes ?? {}).reduce((sum, bytes) => sum + bytes, 0);
    const made = (metrics.get(line.name)?.get("generation_tokens_total") ?? []).reduce((sum, { value }) => sum + value, 0);
    return [line.name, line.state, count(line.requests_running), count(waiting), count(made), used ? size(used) : "–"];
  });
  fillTable(byId("models"), ["Model", "State", "Running", "Waiting", "Tokens so far", `Memory, ${size(memory.free_bytes)} free`], rows);
}

function showFigures(load) {
  const [before, now] = [since(WINDOW_S), latest()];
  const steps = stepsBetween(since(5), now);
  const told = (name, part, inWords) => {
    const ms = quantile(before, now, name, part);
    return ms === null ? "–" : inWords(ms);
  };
  const roughly = (ms) => (ms < 1000 ? `${Number(ms.toPrecision(2))} ms` : `${Number((ms / 1000).toPrecision(2))} s`);
  const latency = (name) => [told(name, 0.5, duration), `p95 ${told(name, 0.95, roughly)} · p99 ${told(name, 0.99, roughly)}`];
  const asked = grown(before, now, "prefix_cache_queries_total");
  const figures = [
    ["Running", count(load.requests_running), load.state === "loaded" ? "" : `the model is ${load.state}`],
    ["Waiting", count(load.requests_waiting), load.requests_waiting && load.waiting_for ? `for ${load.waiting_for}` : ""],
    ["Tokens per second", isFinite(steps.generatedPerSecond) ? count(steps.generatedPerSecond) : "–", "of the last 5 s"],
    ["First token", ...latency("time_to_first_token_seconds")],
    ["Between tokens", ...latency("inter_token_latency_seconds")],
    ["Prefix cache", asked ? share(grown(before, now, "prefix_cache_hits_total"), asked) : "–", `of prompts, last ${WINDOW_S} s`],
    ["Full", share(load.sustained.utilisation, 1), `rows or KV blocks, last ${load.sustained.window_s} s`],
  ];
  byId("figures").replaceChildren(...figures.map(([name, value, more]) => element("div", {},
    element("dt", {}, name), element("dd", { className: "value" }, value), element("dd", { className: "more" }, more))));
}

/** An element of SVG with attributes. */
function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function showCharts() {
  const points = seconds();
  const end = latest().at;
  const x = (at) => CHART_S - (end - at);
  const grid = () => [0, 10, 20, 30, 40].map((y) => drawn("line", { class: "grid", x1: 0, x2: 120, y1: y, y2: y }));
  const top = (values) => roundUp(Math.max(1, ...values));

  const high = top(points.flatMap((point) => [point.generatedPerSecond, point.promptsPerSecond]));
  const y = (value) => 40 - (40 * value) / high;
  const path = (name) => points.map((point) => `${x(point.at).toFixed(2)} ${y(point[name]).toFixed(2)}`).join("L");
  const shapes = points.length > 1 ? [
    drawn("path", { class: "area-decode", d: `M${x(points[0].at)} 40L${path("generatedPerSecond")}L${x(end)} 40` }),
    drawn("path", { class: "line-prefill", d: `M${path("promptsPerSecond")}` }),
  ] : [];
  byId("tokens-top").textContent = count(high);
  byId("tokens-chart").replaceChildren(...grid(), ...shapes);
  const last = points.at(-1);
  tell("tokens", last ? `${count(last.generatedPerSecond)} generated, ${count(last.promptsPerSecond)} of prompts` : "Two readings make a rate.");

  const most = top(points.map((point) => point.decoded + point.prompts));
  const height = (value) => (40 * value) / most;
  byId("batches-top").textContent = count(most);
  byId("batches-chart").replaceChildren(...grid(), ...points.flatMap((point) => {
    const [decoded, prompts] = [height(point.decoded), height(point.prompts)];
    const bar = (name, top, tall) => drawn("rect", { class: name, x: (x(point.at) - 0.8).toFixed(2), width: 0.8, y: top.toFixed(2), height: tall.toFixed(2) });
    return [bar("bar-decode", 40 - decoded, decoded), bar("bar-prefill", 40 - decoded - prompts, prompts)];
  }));
  tell("batches", last ? `${count(last.perSecond)} steps per second, of ${last.rows.toFixed(1)} requests: ${last.decoded.toFixed(1)} decoded tokens and ${last.prompts.toFixed(1)} of prompts` : "");
}

/** The next number of 1, 2 or 5 and zeros. */
function roundUp(number) {
  const unit = 10 ** Math.floor(Math.log10(number));
  return unit * [1, 2, 5, 10].find((times) => times * unit >= number);
}

/** The words above a picture, which say the same to whoever does not see it. */
function tell(name, text) {
  byId(`${name}-words`).textContent = text;
  (byId(`${name}-chart`) ?? byId(`${name}-map`)).setAttribute("aria-label", text);
}

/** The replicas of a cluster, in place of one map: each has a KV cache of its own. */
function showReplicas(replicas) {
  byId("replicas-panel").hidden = !replicas;
  byId("kv-panel").hidden = Boolean(replicas);
  const rows = (replicas ?? []).map((one) => [
    one.name, count(one.requests_running), count(one.requests_waiting), count(one.tokens_left),
    one.kv_blocks ? share(one.kv_blocks - one.kv_blocks_free, one.kv_blocks) : "–",
    one.ready ? one.address : `${one.address}, takes no requests`,
  ]);
  fillTable(byId("replicas"), ["Replica", "Running", "Waiting", "Tokens left", "KV held", "Address"], rows);
}

/** The newest batches of this key. */
function showJobs(jobs) {
  byId("jobs-panel").hidden = jobs.length === 0;
  const rows = jobs.map(({ id, status, request_counts: lines, usage, estimated_end_at: end }) => [
    id.slice(0, 14), status, `${count(lines.completed + lines.failed)} of ${count(lines.total)}`, count(lines.failed),
    count(usage.input_tokens), share(usage.input_tokens_details.cached_tokens, usage.input_tokens), count(usage.output_tokens),
    end ? duration(Math.max(0, 1000 * end - Date.now())) : "–",
  ]);
  fillTable(byId("jobs"), ["Batch", "Status", "Answered", "Failed", "Prompt tokens", "In the cache", "Answer tokens", "Left"], rows);
}

function showPool(pool) {
  const map = byId("kv-map");
  if (!pool) {
    map.replaceChildren();
    tell("kv", "There is no map now: the model is not loaded, or busy.");
    return;
  }
  const blocks = pool.blocks - (pool.states.null ?? 0);
  const part = (state) => share(pool.states[state] ?? 0, blocks);
  tell("kv", blocks ? `${counted(blocks, "block")} of ${pool.block_size} tokens: held ${part("held")}, shared ${part("shared")}, cached ${part("cached")}, free ${part("free")}; ${(100 * pool.waste_ratio).toFixed(1)} % of what is held is without a token` : "This model keeps nothing in the KV cache.");
  const cells = cellsOf(pool);
  const rows = Math.ceil(cells.length / CELLS_IN_ROW);
  map.setAttribute("viewBox", `0 0 ${CELLS_IN_ROW} ${rows}`);
  map.style.height = `${Math.min(16, Math.max(2, rows * 0.55))}rem`;
  const rects = [];
  for (let row = 0; row < rows; row += 1) {
    const line = cells.slice(row * CELLS_IN_ROW, (row + 1) * CELLS_IN_ROW);
    for (let from = 0, to = 0; from < line.length; from = to) {
      while (to < line.length && line[to] === line[from]) to += 1;
      rects.push(drawn("rect", { class: line[from], x: from, y: row + 0.06, width: to - from, height: 0.88 }));
    }
  }
  map.replaceChildren(...rects);
}

/** The class of each cell of the map: that of the block in its middle. */
function cellsOf(pool) {
  const runs = pool.map.filter(([state]) => state !== "null"); // The null block never holds a token.
  const perCell = Math.max(1, Math.ceil(runs.reduce((sum, [, blocks]) => sum + blocks, 0) / MAX_CELLS));
  const cells = [];
  let begin = 0;
  for (const [state, blocks, owner] of runs) {
    const name = state === "held" ? `owner-${owner % NUM_OWNERS}` : state;
    while (cells.length * perCell + Math.floor(perCell / 2) < begin + blocks) cells.push(name);
    begin += blocks;
  }
  return cells;
}

const lanes = new Map(); // Request id -> its elements, kept from look to look: with them the focus, and what is open.

function showLanes(requests, pool) {
  const shown = requests.filter(({ age_ms: age, choices }) => choices[0].state !== "ended" || age - choices[0].time_ms.total < LANES_MS);
  const running = shown.filter(({ choices }) => choices[0].state !== "ended");
  const ended = shown.filter((told) => !running.includes(told));
  const listed = [...running, ...ended].slice(0, MAX_LANES).sort((a, b) => a.age_ms - b.age_ms);
  byId("lanes-words").textContent = shown.length
    ? `${counted(running.length, "request")} on the way${listed.length < shown.length ? `; ${MAX_LANES} of ${shown.length} are shown` : ""}`
    : "None in the last minute. Requests under other keys are not told.";
  const owners = new Map((pool?.owners ?? []).map((owner, index) => [owner.request, index % NUM_OWNERS]));
  const seen = new Set();
  listed.forEach((told, index) => {
    const id = seen.has(told.id) ? `${told.id} (${index})` : told.id;
    seen.add(id);
    const lane = lanes.get(id) ?? lanes.set(id, newLane(id)).get(id);
    lane.show(told, owners.get(told.id));
    if (byId("lanes").children[index] !== lane.item) byId("lanes").insertBefore(lane.item, byId("lanes").children[index] ?? null);
  });
  for (const [id, lane] of lanes) {
    if (seen.has(id)) continue;
    lane.item.remove();
    lanes.delete(id);
  }
}

function newLane(id) {
  const part = (className) => element("span", { className });
  const [chip, state, line] = ["chip", "state", "line"].map(part);
  const [prompt, answer, time] = ["number", "number", "number"].map(part);
  const button = element("button", { type: "button", className: "lane", "aria-expanded": "false" },
    chip, element("span", { className: "id", title: id }, id), state, line, prompt, answer, time);
  const panel = element("div", { className: "lane-why", hidden: true });
  let told = null;
  button.addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) panel.replaceChildren(...explanation(told));
  });
  const show = (request, owner) => {
    const wasOver = told?.choices[0].state === "ended";
    told = request;
    const choice = told.choices[0];
    chip.className = owner === undefined ? "chip" : `chip owner-${owner}`;
    state.textContent = choice.waited.now_for ? `${choice.state}: ${choice.waited.now_for}` : choice.state;
    [prompt.textContent, answer.textContent] = [count(choice.prompt_tokens), count(choice.completion_tokens)];
    time.textContent = duration(choice.time_ms.total);
    button.ariaLabel = `${id}, ${state.textContent}, ${prompt.textContent} tokens in, ${answer.textContent} out, ${time.textContent}`;
    drawPhases(line, phasesOf(choice), told.age_ms - LANES_MS, LANES_MS);
    if (!panel.hidden && !wasOver) panel.replaceChildren(...explanation(told));
  };
  return { item: element("li", {}, button, panel), show };
}

function showRefusals() {
  const now = latest();
  const reasons = [...new Set((now.metrics.get("requests_rejected_total") ?? []).map(({ labels }) => labels.reason))];
  const rows = reasons.map((reason) => [reason, count(total(now, "requests_rejected_total", { reason })),
    count(grown(since(WINDOW_S), now, "requests_rejected_total", { reason }))]);
  const refused = rows.filter(([, number]) => number !== "0");
  fillTable(byId("refusals"), ["Reason", "Since the start", `Last ${WINDOW_S} s`], refused.length ? refused : [["none", "0", "0"]]);
}

/** The columns after the first that hold numbers are set to the right. */
function fillTable(table, titles, rows) {
  const kind = (cell) => (/^[\d–]/.test(cell) ? "number" : "");
  const head = titles.map((title, index) => element("th", { scope: "col", className: kind(rows[0]?.[index] ?? "") }, title));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, index) =>
    index ? element("td", { className: kind(cell) }, cell) : element("th", { scope: "row" }, cell))));
  table.replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

byId("live-model").addEventListener("change", (event) => {
  model = event.target.value;
  readings = [];
  turn();
});
byId("live-again").addEventListener("click", turn);
document.addEventListener("visibilitychange", turn);
addEventListener("hashchange", turn);
turn();
