// One streamed answer of the server: from the body of the request to a message that grows.

import { ask, askJson, eventsOf, ServerError } from "./shared.js";

const WAIT_MS = 1000; // After it without a token, the server is asked what the request waits for; and again each time it passes.

/**
 * Have a chat answered into `message`. `told.changed()` is called for each piece, `told.waits(text)` as long as there is none.
 * Throws `ServerError`, or an `AbortError` after `signal`.
 */
export async function stream(body, message, told, signal) {
  const begun = performance.now();
  const { facts } = message;
  let isTelling = false; // One at a time: a browser has few connections to a server.
  const waiting = setInterval(async () => {
    if (isTelling) return;
    isTelling = true;
    await tellWait(facts.requestId, told);
    isTelling = false;
  }, WAIT_MS);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST", signal, body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      headers: { "Content-Type": "application/json", "X-Request-Id": facts.requestId },
    });
    let [first, all] = [0, 0]; // Characters that came with the first token, as those that a route held back do; and all.
    for await (const events of eventsOf(response)) {
      const at = performance.now() - begun;
      for (const data of events) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, response.status, event.error.code);
        if (event.usage) facts.tokens = event.usage.completion_tokens;
        const choice = event.choices[0];
        if (!choice) continue;
        const size = addDelta(message, choice.delta);
        if (size) {
          clearInterval(waiting);
          facts.ttftMs ??= at;
          facts.decodeMs = at - facts.ttftMs;
          all += size;
          if (!facts.decodeMs) first = all;
          facts.laterShare = 1 - first / all;
          told.changed();
        }
        facts.end = choice.finish_reason ?? facts.end;
      }
    }
    throw new ServerError("The answer ended before it was complete: the connection was lost.", 0);
  } finally {
    clearInterval(waiting);
  }
}

/** Add a piece of an answer. Returns its number of characters. */
function addDelta(message, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const content = delta.content ?? "";
  let size = content.length + reasoning.length;
  message.content += content;
  message.reasoning += reasoning;
  for (const call of delta.tool_calls ?? []) {
    const known = (message.toolCalls[call.index ?? 0] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
    size += (call.function?.name ?? "").length + (call.function?.arguments ?? "").length;
  }
  return size;
}

async function tellWait(requestId, told) {
  const known = await askJson(`v1/requests/${requestId}`).catch((error) => ({ summary: error.status === 404 ? "" : error.message }));
  told.waits(known.summary);
}

/** The number of tokens of an answer; undefined if the server does not say. */
export async function tokensOf(requestId) {
  const known = await askJson(`v1/requests/${requestId}`).catch(() => null);
  return known?.choices[0].completion_tokens;
}
