// The clients of JavaScript, by a server's URL: `openai`, and `ai` (the AI SDK) with `@ai-sdk/openai-compatible`.
//
//     node with_javascript.mjs http://127.0.0.1:8000      // a server with smollm2:135m; run.sh starts one
//
// Runs beside a node_modules that has them. Prints a line for each check, and exits with 1 if one fails.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const url = process.argv[2];
const model = "smollm2:135m";
const messages = [{ role: "user", content: "What is the weather in Rome?" }];
const place = z.object({ place: z.enum(["Rome", "Oslo"]) });
const report = z.object({ place: z.enum(["Rome", "Oslo"]), sky: z.enum(["sunny", "grey"]) });
const few = { model, temperature: 0, max_tokens: 60 };

function client(name) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: `openai-node-${name}`, maxRetries: 0, timeout: 60_000 });
}

async function openaiChat() {
  const chats = client("chat").chat.completions;
  const whole = await chats.create({ ...few, messages });
  let text = "";
  for await (const chunk of await chats.create({ ...few, messages, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.ok(text);
  assert.equal(text, whole.choices[0].message.content);
  const helped = await chats.stream({ ...few, messages, stream_options: { include_usage: true } }).finalChatCompletion();
  assert.equal(helped.choices[0].message.content, text);
  assert.equal(helped.usage.completion_tokens, whole.usage.completion_tokens);
}

async function openaiCompletion() {
  const answer = await client("completion").completions.create({ ...few, prompt: "The capital of France is" });
  assert.match(answer.choices[0].text, /Paris/);
}

async function openaiParse() {
  const format = zodResponseFormat(report, "report");
  const answer = await client("parse").chat.completions.parse({ ...few, messages, response_format: format });
  report.parse(answer.choices[0].message.parsed);
}

async function openaiTools() {
  const chats = client("tools").chat.completions;
  const weather = zodFunction({ name: "get_weather", description: "The weather.", parameters: place });
  const asked = { ...few, tools: [weather], parallel_tool_calls: false };
  const called = await chats.parse({ ...asked, messages, tool_choice: "required" });
  const [call] = called.choices[0].message.tool_calls;
  place.parse(call.function.parsed_arguments);
  const history = [
    ...messages,
    called.choices[0].message,
    { role: "tool", tool_call_id: call.id, content: "sunny, 24 degrees" },
  ];
  const told = await chats.create({ ...asked, messages: history, tool_choice: "none" });
  assert.ok(told.choices[0].message.content);
  const named = { type: "function", function: { name: "get_weather" } };
  const streamed = await chats.stream({ ...asked, messages, tool_choice: named }).finalChatCompletion();
  assert.equal(streamed.choices[0].message.tool_calls[0].function.name, "get_weather");
}

async function openaiResponses() {
  const { responses } = client("responses");
  const asked = { model, temperature: 0, max_output_tokens: 60, input: "Name a river.", store: false };
  const whole = await responses.create(asked);
  assert.ok(whole.output_text);
  const streamed = await responses.stream(asked).finalResponse();
  assert.equal(streamed.output_text, whole.output_text);
}

async function openaiErrors() {
  const error = await client("errors").chat.completions.create({ ...few, messages: [] }).catch((error) => error);
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "messages");
  assert.ok(error.requestID);
}

async function openaiAbort() {
  const stream = await client("abort").chat.completions.create({ model, messages, stream: true, max_tokens: 4000, ignore_eos: true });
  for await (const _ of stream) {
    stream.controller.abort();
  }
  for (let tries = 0; tries < 100; tries += 1) {
    const load = await (await fetch(`${url}/load`)).json();
    if (load.requests_running === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.fail("the request goes on");
}

function sdkModel(name, options = {}) {
  return createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: `ai-sdk-${name}`, ...options })(model);
}

const sdkFew = { temperature: 0, maxOutputTokens: 60, maxRetries: 0 };

async function sdkText() {
  const asked = { ...sdkFew, model: sdkModel("text", { includeUsage: true }), system: "Be brief.", prompt: "Name a river." };
  const whole = await generateText(asked);
  assert.ok(whole.text);
  assert.ok(whole.usage.outputTokens > 0);
  const streamed = streamText(asked);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
}

async function sdkTools() {
  const tools = {
    get_weather: tool({
      description: "The weather.",
      inputSchema: place,
      execute: async ({ place }) => `sunny in ${place}`,
    }),
  };
  const asked = {
    ...sdkFew,
    model: sdkModel("tools"),
    tools,
    messages,
    providerOptions: { penstock: { parallel_tool_calls: false } },
  };
  const once = await generateText({ ...asked, toolChoice: "required" });
  assert.equal(once.toolResults[0].toolName, "get_weather");
  assert.match(once.toolResults[0].output, /sunny in (Rome|Oslo)/);
  const streamed = streamText({ ...asked, toolChoice: { type: "tool", toolName: "get_weather" } });
  const [call] = await streamed.toolCalls;
  place.parse(call.input);
  const history = [...messages, ...once.responseMessages];
  const told = await generateText({ ...asked, messages: history, toolChoice: "none" });
  assert.ok(told.text);
  await generateText({ ...asked, stopWhen: isStepCount(2) }); // the model calls, or does not
}

async function sdkObject() {
  const asked = { ...sdkFew, output: Output.object({ schema: report }), prompt: messages[0].content };
  const found = await generateText({ ...asked, model: sdkModel("object", { supportsStructuredOutputs: true }) });
  report.parse(found.output);
  const streamed = streamText({ ...asked, model: sdkModel("object", { supportsStructuredOutputs: true }) });
  assert.deepEqual(await streamed.output, found.output);
}

const checks = [
  openaiChat,
  openaiCompletion,
  openaiParse,
  openaiTools,
  openaiResponses,
  openaiErrors,
  openaiAbort,
  sdkText,
  sdkTools,
  sdkObject,
];

let failed = 0;
for (const check of checks) {
  try {
    await check();
    console.log(`ok   javascript ${check.name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL javascript ${check.name}\n${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
