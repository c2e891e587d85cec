// The tour: one request that the page sends itself, stage by stage with its own numbers, and where each stage's code is.

import { element, isOver } from "/dashboard/chart.js";
import { $, emptyRow, known, made, percent, readEvents, refusal, tell, time, whole } from "/dashboard/elements.js";

const PATH = "/v1/chat/completions";
const BODY = {
  messages: [{ role: "user", content: "What is continuous batching?" }], max_tokens: 24, stream: true, logprobs: true, top_logprobs: 5,
  timings: true, stream_options: { include_usage: true },
};
const NUM_LOOKS = 12, LOOK_MS = 250;

/**
 * What was measured of the request.
 * @typedef {{stages: Record<string, number>, usage: any, timings: any, told: any, tokens: any[], numFrames: number, numBytes: number,
 *   left: string | null, connection: PerformanceResourceTiming | undefined, seen_ms: number}} Seen
 *   stages: ms by name; left: requests of this minute's; seen_ms: its whole time as the browser saw it
 * @typedef {[number, number, number, number, boolean?]} Box x, y, width, height of 120 x 40; filled
 * @typedef {{name: string, file: string, words: string, took?: string[], numbers: (seen: Seen) => string, draw: (seen: Seen) => [Box[], string]}} Stage
 *   took: the stages of the server's clock that it is; draw: boxes, and the path of a line
 */

/** @param {number} num @param {(i: number) => Box} make @returns {Box[]} */
const boxes = (num, make) => Array.from({ length: Math.max(0, num) }, (_, i) => make(i));
/** @param {Seen} seen */
const numPrompt = (seen) => seen.usage?.prompt_tokens ?? 0;
/** @param {Seen} seen */
const numCached = (seen) => seen.usage?.prompt_tokens_details?.cached_tokens ?? 0;
/** @param {Seen} seen */
const numAnswer = (seen) => seen.usage?.completion_tokens ?? seen.tokens.length;
/** @param {Seen} seen */
const isNew = ({ connection }) => Boolean(connection && connection.connectEnd > connection.connectStart);

/** @type {Stage[]} in the order of a request's life */
const STAGES = [
  {
    name: "Accept", file: "server/listening/listener.py",
    words: "The listener accepts the connection and counts it against its limits. One event loop serves all connections, so an idle one needs no thread.",
    numbers: (seen) => `${!seen.connection ? "The browser does not tell" : isNew(seen) ? `A new connection, ${time(seen.connection.connectEnd - seen.connection.connectStart)}` : "A connection that was open already"}${seen.connection?.nextHopProtocol ? `, ${seen.connection.nextHopProtocol}` : ""}.`,
    draw: () => [[[4, 12, 26, 16], [90, 4, 26, 32, true]], "M30 20H88m-6 -5l6 5l-6 5"],
  },
  {
    name: "TLS", file: "server/wire/tls.py",
    words: "With a certificate the server ends TLS itself: 1.2 with forward secrecy, or 1.3. A handshake that takes too long closes the connection.",
    numbers: (seen) => (location.protocol !== "https:" ? "None: this page came over plain HTTP." : isNew(seen) && seen.connection ? `A handshake of ${time(seen.connection.connectEnd - seen.connection.secureConnectionStart)}.` : "No handshake: the connection was open already."),
    draw: () => [[[46, 18, 28, 18, location.protocol === "https:"]], "M52 18v-6a8 8 0 0 1 16 0v6"],
  },
  {
    name: "Parse", file: "server/wire/http1.py", took: ["head", "body", "offload", "validate"],
    words: "Bytes become a head, then a body, without any I/O in the parser: HTTP/1.1 here, HTTP/2 in the file beside it. The body is decoded directly into a type that limits each field.",
    numbers: (seen) => `Head ${known(seen.stages.head, time)}, body ${known(seen.stages.body, time)}, checked in ${known(seen.stages.validate, time)}.`,
    draw: () => [[[76, 4, 40, 8, true], [76, 16, 30, 8, true], [76, 28, 36, 8, true]], "M4 8h44M4 20h36M4 32h40M54 20h14m-5 -4l5 4l-5 4"],
  },
  {
    name: "Authentication", file: "server/gate/identity.py", took: ["auth"],
    words: "The key's digest is looked up, and the caller becomes a tenant with rights. Where any key is configured, who sends none is refused.",
    numbers: (seen) => `Tenant ${seen.told.tenant}.`,
    draw: () => [[[50, 18, 50, 4, true], [88, 22, 4, 8, true], [96, 22, 4, 8, true]], "M40 10a10 10 0 1 0 .1 0z"],
  },
  {
    name: "Quota", file: "server/gate/quota.py", took: ["quota"],
    words: "Requests and tokens are reserved from every limit that applies, or from none. What the answer does not use is returned at its end.",
    numbers: (seen) => (seen.left === null ? "No request limit applies here." : `${seen.left} requests are left of this minute's.`),
    draw: () => [[[46, 20, 28, 16, true]], "M44 4v32h32V4"],
  },
  {
    name: "Admission", file: "server/gate/admission.py", took: ["queue"],
    words: "Requests, bytes and prompt tokens in progress are bounded, and a request that would wait too long is refused at once. Admitted requests wait for their step: class first, then each tenant's share.",
    numbers: (seen) => `It waited ${known(seen.stages.queue, time)} for its step.`,
    draw: () => [[...boxes(4, (i) => [6 + 18 * i, 12, 12, 16, i === 3])], "M84 4v32M92 20h22m-5 -4l5 4l-5 4"],
  },
  {
    name: "Tokenization", file: "core/tokenizer.py", took: ["template", "tokenize"],
    words: "The model's own template writes the chat as one text, and the tokenizer cuts it into ids. Long texts are cut on another thread.",
    numbers: (seen) => `${whole(numPrompt(seen))} tokens; template ${known(seen.stages.template, time)}, tokenizer ${known(seen.stages.tokenize, time)}.`,
    draw: () => [[[4, 4, 112, 8], ...boxes(7, (/** @type {number} */ i) => /** @type {Box} */ ([4 + 16 * i, 26, 12, 10, true]))], "M60 13v10m-4 -4l4 4l4 -4"],
  },
  {
    name: "Prefix cache", file: "core/kv_cache.py",
    words: "The prompt is looked up block by block, by a hash of all that comes before. Blocks that an earlier request of the same tenant computed are reused.",
    numbers: (seen) => `${whole(numCached(seen))} of ${whole(numPrompt(seen))} tokens were there${numCached(seen) ? "" : ": send it again, and whole blocks are found"}.`,
    draw: (seen) => [boxes(10, (i) => [4 + 11.4 * i, 12, 9, 16, i < Math.round((10 * numCached(seen)) / Math.max(1, numPrompt(seen)))]), ""],
  },
  {
    name: "Prefill", file: "core/scheduler.py", took: ["prefill"],
    words: "The rest of the prompt is computed many tokens at a time, beside the tokens that other requests decode. Chunks are cut by a measured cost model, so that nobody's next token comes much later.",
    numbers: (seen) => `${whole(numPrompt(seen) - numCached(seen))} tokens in ${whole(seen.told.prefill_chunks ?? 0)} steps.`,
    draw: (seen) => [boxes(Math.min(8, seen.told.prefill_chunks ?? 1), (i) => [4 + 14 * i, 4, 12, 32, true]), ""],
  },
  {
    name: "Decode", file: "core/engine.py", took: ["first_token", "decode"],
    words: "Each step computes one more token of every running request, all in one pass over the weights. On a GPU the next step is planned while the device computes this one.",
    numbers: (seen) => `${whole(numAnswer(seen))} tokens${numAnswer(seen) > 1 ? `, one in ${known(seen.stages.decode, (ms) => time(ms / (numAnswer(seen) - 1)))}` : ""}.`,
    draw: (seen) => [boxes(Math.min(24, numAnswer(seen)), (i) => [4 + 4.7 * i, 32 - 1.2 * i, 3.5, 4 + 1.2 * i, true]), ""],
  },
  {
    name: "Sampling", file: "gpu/sampler.py",
    words: "The logits become one token a row: penalties, top-k, top-p, the temperature and the noise of a seed. The noise depends on the seed and the position alone.",
    numbers: ({ tokens: [first] }) => (first ? `The first of it: ${JSON.stringify(first.token)}, at ${percent(Math.exp(first.logprob))}.` : "No logprobs came."),
    draw: ({ tokens: [first] }) => [(first?.top_logprobs ?? []).map((/** @type {any} */ one, /** @type {number} */ i) => {
      const height = Math.max(1, 34 * Math.exp(one.logprob));
      return /** @type {Box} */ ([10 + 22 * i, 37 - height, 14, height, one.token === first.token]);
    }), "M4 38H116"],
  },
  {
    name: "Detokenization", file: "core/detokenizer.py", took: ["detokenize"],
    words: "Ids become text that is safe to send: whole characters, and nothing that may become a stop string. The loop does nothing else for a token.",
    numbers: (seen) => `${known(seen.stages.detokenize, time)} for ${whole(numAnswer(seen))} tokens.`,
    draw: () => [boxes(4, (i) => [4 + 13 * i, 14, 10, 12, true]), "M60 20h14m-5 -4l5 4l-5 4M84 30l8 -22l8 22M87 22h10"],
  },
  {
    name: "SSE frames", file: "server/wire/sse.py",
    words: "Each piece of text becomes a line of JSON behind `data:`. What does not change between frames is encoded once.",
    numbers: (seen) => `${whole(seen.numFrames)} frames, ${whole(seen.numBytes)} bytes.`,
    draw: (seen) => [boxes(Math.min(9, seen.numFrames), (i) => [4 + 12.6 * i, 8, 10, 24, i === 0]), ""],
  },
  {
    name: "Flush", file: "server/wire/stream.py", took: ["first_flush", "last_flush"],
    words: "Frames go to the kernel as soon as they are made. A slow reader pauses only its own request.",
    numbers: (seen) => `First text after ${known(seen.timings?.ttft, time)} at the server; all of it after ${time(seen.seen_ms)} here.`,
    draw: () => [[[4, 6, 40, 28, true]], "M50 20h60m-8 -6l8 6l-8 6"],
  },
  {
    name: "Metering", file: "server/ledger/ledger.py", took: ["settle"],
    words: "Usage is settled: quotas count it, and a ledger has a durable row for the request before the last frame. A crash bills nobody twice.",
    numbers: (seen) => `${whole(numPrompt(seen))} tokens in, ${whole(numAnswer(seen))} out.`,
    draw: () => [boxes(3, (i) => [20, 5 + 11 * i, 80, 8, i === 2]), "M84 2v36"],
  },
];

/** @param {Stage} stage @param {Seen} seen */
function pictureOf(stage, seen) {
  const svg = element("svg", { class: "picture", viewBox: "0 0 120 40", "aria-hidden": "true" }), [found, line] = stage.draw(seen);
  for (const [x, y, width, height, isFilled] of found) svg.append(element("rect", { x, y, width, height, rx: 1, class: isFilled ? "filled" : "empty" }));
  if (line) svg.append(element("path", { d: line }));
  return svg;
}

/** @type {Seen} what the pictures show before a request is sent */
const EXAMPLE = {
  stages: {}, usage: { prompt_tokens: 40, completion_tokens: 24, prompt_tokens_details: { cached_tokens: 16 } }, timings: null, told: { prefill_chunks: 2 },
  tokens: [{ token: "a", logprob: -0.4, top_logprobs: [{ token: "a", logprob: -0.4 }, { token: "b", logprob: -1.6 }, { token: "c", logprob: -2.6 }] }],
  numFrames: 9, numBytes: 0, left: null, connection: undefined, seen_ms: 0,
};

/** @param {Stage} stage @param {Seen} seen @param {number} most the longest stage's time */
function itemOf(stage, seen, most) {
  const item = made("li", ""), text = made("div", ""), took = (stage.took ?? []).filter((name) => name in seen.stages);
  const sum = took.reduce((all, name) => all + seen.stages[name], 0), title = made("h3", stage.name);
  if (took.length) {
    const meter = /** @type {HTMLMeterElement} */ (made("meter", ""));
    [meter.max, meter.value] = [most, sum];
    meter.setAttribute("aria-label", `${stage.name}'s part of the longest stage`);
    title.append(made("span", ` ${time(sum)} `, "quiet"), meter);
  }
  const file = made("p", "", "quiet");
  file.append(made("code", stage.file));
  text.append(title, made("p", stage.words), ...(seen === EXAMPLE ? [] : [made("p", stage.numbers(seen), "numbers")]), file);
  item.append(pictureOf(stage, seen), text);
  return item;
}

// The switches: what POST /admin/simulate takes and answers.

/** @type {Record<string, [string, string]>} its name, and what it means, by switch */
const SWITCHES = {
  continuous_batching: ["Continuous batching", "Without it, a batch ends before the next one begins. With it, a new request takes the place of each that ends."],
  chunked_prefill: ["Chunked prefill", "Without it, prompts are computed as fast as possible, and decoding requests wait. With it, they are cut so that nobody's next token comes much later, and first tokens come later."],
  prefix_cache: ["Prefix cache", "Three quarters of each prompt are the same text. With it, they are computed once."],
  speculation: ["Speculation", "Each request predicts its answer, with every twelfth token wrong. With it, a step verifies several predicted tokens of a request at once where that saves time; the answers are the same."],
  second_replica: ["A second replica", "With it, every second request goes to another server of the same speed."],
  cancel: ["Clients who leave", "With it, every second client leaves after a while. Their resources are free at once; the figures are those of the others."],
  slow_client: ["Clients who read slowly", "With it, every second client stops reading after a while, for the same time. Their requests pause; the figures are those of the others."],
  overload: ["Refusals under overload", "Clients leave if their first token is late, and more arrive than the server can handle. Without it, all are admitted: time is spent on prompts whose clients will leave. With it, requests that would be late are refused at once, by the server's own admission."],
};
/** @type {[string, string, number][]} the field, its label, and what it begins with */
const NUMBERS = [
  ["num_requests", "Requests", 16], ["gap_ms", "Between two, ms", 20], ["prompt_tokens", "Tokens of a prompt", 256], ["answer_tokens", "Tokens of the longest answer", 48],
  ["num_slots", "Requests that run together", 8], ["step_ms", "A step, ms", 10], ["token_ms", "Each of its tokens, ms more", 0.1], ["after_ms", "Clients act, or have patience, ms", 200],
];
/** @type {[string, string, (value: number) => string][]} */
const OUTCOMES = [
  ["mean_first_token_ms", "First token, mean", time], ["p95_gap_ms", "Between tokens, p95", time], ["longest_gap_ms", "Between tokens, longest", time], ["whole_ms", "All requests", time],
  ["num_tokens", "Tokens answered", whole], ["num_cached_tokens", "Prompt tokens found in the cache", whole], ["num_steps", "Steps", whole],
  ["num_late", "Clients who left before their first token", whole], ["num_refused", "Requests refused at once", whole],
];

/** @param {string} title @param {any} outcome @param {number} end */
function figureOf(title, outcome, end) {
  const rows = outcome.requests, figure = made("figure", "");
  const svg = element("svg", { class: "run", viewBox: `0 0 400 ${6 * rows.length}`, role: "img", "aria-label": `${title}: ${rows.length} requests in ${time(outcome.whole_ms)}` });
  rows.forEach((/** @type {[number, number | null, number]} */ [arrival, first, last], /** @type {number} */ i) => {
    const begun = first ?? last, isRefused = first === null && arrival === last;
    const parts = isRefused ? [["refused", arrival, Number(arrival) + end / 100]] : [["waits", arrival, begun], ["answers", begun, last]];
    for (const [name, from, to] of parts) svg.append(element("rect", { class: name, x: (400 * Number(from)) / end, y: 6 * i, width: (400 * (Number(to) - Number(from))) / end, height: 5 }));
  });
  figure.append(made("figcaption", title), svg);
  return figure;
}

/** @param {(path: string, more?: RequestInit) => Promise<Response>} ask */
function switches(ask) {
  const explain = () => tell($("simulate-told"), SWITCHES[$("switch").value][1]);
  $("switch").append(...Object.entries(SWITCHES).map(([value, [name]]) => {
    const option = /** @type {HTMLOptionElement} */ (made("option", name));
    option.value = value;
    return option;
  }));
  $("simulate-fields").append(...NUMBERS.map(([name, words, value]) => {
    const label = made("label", `${words} `), input = document.createElement("input");
    Object.assign(input, { type: "number", name, value: String(value), step: "any", min: "0", required: true });
    label.append(input);
    return label;
  }));
  $("switch").addEventListener("change", explain);
  explain();
  $("simulate").addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    const asked = Object.fromEntries(NUMBERS.map(([name]) => [name, Number($("simulate").elements[name].value)]));
    const body = JSON.stringify({ switch: $("switch").value, ...asked }), answer = await ask("/admin/simulate", { method: "POST", body }).catch(() => null);
    if (!answer?.ok) return tell($("simulate-told"), answer ? await refusal(answer) : "The server does not answer.");
    const { off, on } = await answer.json(), end = Math.max(off.whole_ms, on.whole_ms);
    explain();
    $("outcomes").replaceChildren(...OUTCOMES.filter(([name]) => off[name] || on[name]).map(([name, words, format]) => {
      const line = emptyRow(3, [1, 2]);
      [words, known(off[name], format), known(on[name], format)].forEach((text, i) => tell(line.cells[i], text));
      return line;
    }));
    $("runs").replaceChildren(figureOf("Without", off, end), figureOf("With", on, end));
    $("simulated").hidden = false;
  });
}

/**
 * The view's behaviour.
 * @param {(path: string, more?: RequestInit) => Promise<Response>} ask
 */
export function tour(ask) {
  /** @param {string} text */
  const say = (text) => tell($("tour-told"), text);

  /** @returns {Promise<Seen | string>} or why it is not to be had */
  async function send() {
    const models = await ask("/v1/models");
    if (!models.ok) return refusal(models);
    const model = (await models.json()).data.find((/** @type {any} */ one) => !one.tasks || one.tasks.includes("generate"))?.id;
    if (!model) return "No model here answers.";
    const began = performance.now(), answer = await ask(PATH, { method: "POST", body: JSON.stringify({ model, ...BODY }) });
    if (!answer.ok) return refusal(answer);
    /** @type {any} */
    let usage = null;
    /** @type {any} */
    let timings = null, failed = "";
    /** @type {any[]} */
    const tokens = [];
    let numFrames = 0, numBytes = 0;
    await readEvents(answer, (data, numSoFar) => {
      [numFrames, numBytes] = [numFrames + 1, numSoFar];
      const event = data === "[DONE]" ? {} : JSON.parse(data);
      usage = event.usage ?? usage;
      timings = event.timings ?? timings;
      failed = event.error?.message ?? failed;
      for (const one of event.choices ?? []) tokens.push(...(one.logprobs?.content ?? []));
    });
    if (failed) return failed;
    const seen_ms = performance.now() - began, told = await stagesOf(String(answer.headers.get("x-request-id")));
    if (typeof told === "string") return told;
    /** @type {Record<string, number>} */
    const stages = {};
    for (const one of told.stages) stages[one.stage] = (stages[one.stage] ?? 0) + one.duration_ms;
    if (told.detokenize_ms !== undefined) {
      stages.detokenize = told.detokenize_ms; // within decode
      if ("decode" in stages) stages.decode = Math.max(0, stages.decode - told.detokenize_ms);
    }
    const all = /** @type {PerformanceResourceTiming[]} */ (performance.getEntriesByType("resource"));
    const connection = all.filter((one) => one.name.endsWith(PATH)).at(-1);
    return { stages, usage, timings, told, tokens, numFrames, numBytes, left: answer.headers.get("x-ratelimit-remaining-requests"), connection, seen_ms };
  }

  /** @param {string} id @returns {Promise<any>} or why not */
  async function stagesOf(id) {
    for (let i = 0; i < NUM_LOOKS; i++) {
      const answer = await ask(`/v1/requests/${encodeURIComponent(id)}`), told = answer.ok ? await answer.json() : null;
      if (told === null) return refusal(answer);
      if (isOver(told)) return told;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
    return "The request is not over.";
  }

  switches(ask);
  $("tour-stages").append(...STAGES.map((stage) => itemOf(stage, EXAMPLE, 0)));
  $("tour-send").addEventListener("click", async () => {
    $("tour-send").disabled = true;
    say("The request has been sent.");
    const seen = await send().catch((error) => `The connection is lost: ${error.message}`);
    $("tour-send").disabled = false;
    if (typeof seen === "string") return say(seen);
    const most = Math.max(...Object.values(seen.stages)), step_ms = seen.stages.decode / (numAnswer(seen) - 1);
    if (step_ms > 0.01) $("simulate").elements.step_ms.value = step_ms.toFixed(2); // the visitor's own
    $("tour-stages").replaceChildren(...STAGES.map((stage) => itemOf(stage, seen, most)));
    say(`Request ${seen.told.id} through ${STAGES.length} stages, in ${time(seen.told.duration_ms)}.`);
  });
}
