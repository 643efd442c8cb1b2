// The settings at the side of the chat: what they hold, and the fields of a request that they make. The browser keeps them.

import { askJson, byId, element, recall, store } from "./shared.js";

const STORE = "penstock.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FIELDS = ["model", "system", "schema", ...NUMBERS];

/** The model that is chosen, also while there is no list to choose from. */
const chosenModel = () => byId("model").value || recall(STORE)?.model;

function keepSettings() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
  store(STORE, JSON.stringify({ ...values, model: chosenModel() }));
}

/** Fill in what was kept, then ask the server for its models. Throws `ServerError`. */
export async function recallSettings() {
  const kept = recall(STORE);
  for (const name of FIELDS) if (name !== "model") byId(name).value = kept?.[name] ?? "";
  await loadModels();
}

/** List the models that write text. A model's task is null until it was loaded for the first time: that one is listed, too. */
export async function loadModels() {
  const { data } = await askJson("v1/models");
  const chosen = chosenModel();
  const writers = data.filter(({ task }) => task === "generate" || task === null);
  const select = byId("model");
  select.replaceChildren(...writers.map(({ id, status: { value } }) =>
    element("option", { value: id }, value === "loaded" ? id : `${id} (${value})`)));
  if (writers.some(({ id }) => id === chosen)) select.value = chosen;
  byId("no-model").hidden = writers.length > 0;
}

/** The fields of a request that come from the settings, or null after the reader was shown which of them is wrong. */
export function settingsOfRequest() {
  const wrong = NUMBERS.map(byId).find((field) => !field.checkValidity());
  const schema = readSchema();
  if (wrong || schema === null) {
    unfold("settings", true);
    if (wrong) wrong.reportValidity();
    else byId("schema").focus();
    return null;
  }
  const fields = { model: byId("model").value || undefined };
  for (const name of NUMBERS) if (byId(name).value !== "") fields[name] = byId(name).valueAsNumber;
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return fields;
}

/** The system prompt as a list of messages: one or none. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** The schema, undefined if the field is empty, null if it does not hold a JSON object. */
function readSchema() {
  const text = byId("schema").value.trim();
  let found;
  let trouble = "";
  try {
    found = text ? JSON.parse(text) : undefined;
    if (text && (found === null || typeof found !== "object" || Array.isArray(found))) trouble = "A schema is a JSON object.";
  } catch (error) {
    trouble = `This is not JSON: ${error.message}`;
  }
  byId("schema-error").textContent = trouble;
  byId("schema").setAttribute("aria-invalid", String(Boolean(trouble)));
  return trouble ? null : found;
}

/** Open or close a side of the chat, which a narrow screen folds behind a button. */
export function unfold(name, isOpen) {
  byId(`${name}-button`).setAttribute("aria-expanded", String(isOpen));
  byId(name).classList.toggle("open", isOpen);
}

for (const name of ["settings", "list"]) {
  byId(`${name}-button`).addEventListener("click", (event) => {
    const isOpen = event.target.getAttribute("aria-expanded") === "false";
    for (const other of ["settings", "list"]) unfold(other, other === name && isOpen);
  });
}
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("settings").addEventListener("change", () => {
  readSchema();
  keepSettings();
});
