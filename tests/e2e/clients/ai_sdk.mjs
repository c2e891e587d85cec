// Vercel's AI SDK, with tools: `node ai_sdk.mjs URL DIRECTORY` prints what came of it, as JSON. The packages are in DIRECTORY.
import { createRequire } from "node:module";

const require = createRequire(`${process.argv[3]}/`);
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateText, generateObject, streamObject, streamText, stepCountIs, tool } = require("ai");
const { z } = require("zod");

const provider = createOpenAICompatible({
  name: "steploop", baseURL: process.argv[2], apiKey: "none", supportsStructuredOutputs: true,
});
const model = provider("played");
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string(), days: z.number().int().optional() }),
    execute: async ({ city, days }) => `21 degrees in ${city} for ${days}`,
  }),
};
const asked = { model, tools, prompt: "How warm is it in Köln?", stopWhen: stepCountIs(4), maxRetries: 0 };

const whole = await generateText(asked);
const stream = streamText(asked);
let text = "";
for await (const part of stream.textStream) text += part;
const steps = await stream.steps;
const form = {
  model, maxRetries: 0, prompt: "Who was Ada?", schema: z.object({ name: z.string(), born: z.number().int() }),
};
const { object } = await generateObject(form);
const streamed = streamObject(form);
for await (const part of streamed.partialObjectStream) void part;
console.log(JSON.stringify([
  whole.text, whole.steps.map((step) => step.finishReason),
  text, steps.map((step) => step.finishReason), object, await streamed.object,
]));
