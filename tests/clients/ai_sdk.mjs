// The Vercel AI SDK against one endpoint: node ai_sdk.mjs URL chat|responses|open-responses|messages. Prints what each call gave as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, endpoint] = process.argv.slice(2);
const settings = { baseURL: url, apiKey: "none" };
const model = {
  chat: () => createOpenAI(settings).chat("demo"),
  responses: () => createOpenAI(settings).responses("demo"),
  "open-responses": () => createOpenResponses({ name: "local", url: `${url}/responses`, apiKey: "none" })("demo"),
  messages: () => createAnthropic(settings)("demo"),
}[endpoint]();
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `18 degrees in ${city}`,
});

const summary = ({ text, reasoningText, finishReason, steps, usage }) => ({
  text,
  reasoning: reasoningText ?? null,
  finishReason,
  calls: steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input])),
  results: steps.flatMap((step) => step.toolResults.map((result) => result.output)),
  numSteps: steps.length,
  outputTokens: usage.outputTokens,
  warnings: steps.flatMap((step) => step.warnings ?? []),
});

async function streamed(request) {
  const errors = [];
  const result = streamText({ ...request, onError: ({ error }) => errors.push(String(error)) });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  if (errors.length) throw new Error(errors.join("; "));
  const [text, reasoningText, finishReason, steps, usage] = await Promise.all([
    result.text,
    result.reasoningText,
    result.finishReason,
    result.steps,
    result.usage,
  ]);
  return { ...summary({ text, reasoningText, finishReason, steps, usage }), numPieces: pieces.length };
}

const settled = { model, maxRetries: 0, maxOutputTokens: 500 };
const plain = { ...settled, prompt: "Say hello." };
const agent = { ...settled, prompt: "What is the weather?", tools: { weather }, stopWhen: stepCountIs(3) };
const place = z.object({ city: z.string(), country: z.string() });
const object = await generateObject({ ...settled, prompt: "Describe the place as JSON.", schema: place });
console.log(
  JSON.stringify({
    text: summary(await generateText(plain)),
    textStream: await streamed(plain),
    object: object.object,
    agent: summary(await generateText(agent)),
    agentStream: await streamed(agent),
  }),
);
