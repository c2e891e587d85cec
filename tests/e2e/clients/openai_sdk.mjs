// OpenAI's SDK for Node: `node openai_sdk.mjs URL DIRECTORY` prints what came of it, as JSON. The package is in DIRECTORY.
import { createRequire } from "node:module";

const { OpenAI } = createRequire(`${process.argv[3]}/`)("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const [model, question] = ["played", "How warm is it in Köln?"];
const schema = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
const shape = { name: "get_weather", parameters: schema };
const weather = ({ city, days }) => `21 degrees in ${city} for ${days}`;

const run = client.chat.completions.runTools({
  model, stream: true, messages: [{ role: "user", content: question }],
  tools: [{ type: "function", function: { ...shape, function: weather, parse: JSON.parse } }],
});
const called = await run.finalFunctionToolCall();
const text = await run.finalContent();

const input = [{ role: "user", content: question }];
const items = [];
let said = "";
for (let turn = 0; turn < 2; turn += 1) {
  const stream = client.responses.stream({ model, input, tools: [{ type: "function", strict: false, ...shape }] });
  for await (const event of stream) if (event.type === "response.output_text.delta") said += event.delta;
  const { output } = await stream.finalResponse();
  for (const item of output) {
    items.push(item.type);
    input.push(item);
    if (item.type !== "function_call") continue;
    const result = weather(JSON.parse(item.arguments));
    input.push({ type: "function_call_output", call_id: item.call_id, output: result });
  }
}
const { data } = await client.embeddings.create({ model, input: ["a", "b"] });
console.log(JSON.stringify([
  text, [called.name, JSON.parse(called.arguments)], said, items, data.map((one) => one.embedding.length),
]));
