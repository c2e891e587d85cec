// The dashboard: reads the one stream of frames and shows it.

import { Chart, bar, isOver, showStages } from "/dashboard/chart.js";
import { $, count, emptyRow, fill, known, made, percent, readEvents, refusal, size, tell, time, whole } from "/dashboard/elements.js";
import { BlockGrid, STATES, StepLoop } from "/dashboard/engine.js";
import { playground } from "/dashboard/playground.js";
import { tenants } from "/dashboard/tenants.js";
import { tour } from "/dashboard/tour.js";

/**
 * @typedef {import("/dashboard/elements.js").Row} Row
 * @typedef {{version: string, model: string | null, state: string, columns?: string[], points: (number | null)[][],
 *   now: (number | null)[], promises: Row[], num_requests: number, requests: Row[], ended: Row[],
 *   devices: Row[], steps: import("/dashboard/engine.js").Step[], preempted: [number, string, number, string, string][],
 *   blocks: import("/dashboard/engine.js").BlockMap[]}} Frame
 */

const MAX_POINTS = 720, MAX_ENDED = 1000, MAX_SHOWN = 100, MAX_PREEMPTED = 64, MAX_BESIDE = 12, RETRY_MS = 1000, MAX_RETRY_MS = 15000;

/** @type {string | null} */
let key = null; // in memory alone
/** @type {string[]} */
let columns = [];
/** @type {(number | null)[][]} */
let points = [];
/** @type {Row[]} */
let ended = []; // the latest first
/** @type {Row[]} */
let running = [];
/** @type {string | null} */
let shownId = null; // of the request whose waterfall is open

/** @type {[string, [string, string][], (value: number) => string][]} a title, its columns with their labels, the unit */
const TILES = [
  ["Requests per second", [["requests_per_s", ""]], count],
  ["Tokens per second", [["tokens_in_per_s", "in"], ["tokens_out_per_s", "out"]], count],
  ["First token", [["ttft_p50_ms", "p50"], ["ttft_p95_ms", "p95"]], time],
  ["Between tokens", [["inter_token_p50_ms", "p50"], ["inter_token_p95_ms", "p95"]], time],
  ["Sequences", [["num_running", "running"], ["num_waiting", "in the queue"]], whole],
  ["Errors and refusals per second", [["errors_per_s", ""]], count],
  ["KV cache used", [["kv_used", ""]], percent],
  ["Memory of the process", [["memory_bytes", ""]], size],
];

/** @type {Record<string, [string, (value: number) => string, string?]>} by the rule's name; the tile that shows it, too */
const PROMISES = {
  ttft_p50_ms: ["First token, p50", time, "First token"], ttft_p95_ms: ["First token, p95", time, "First token"],
  inter_token_p95_ms: ["Between tokens, p95", time, "Between tokens"],
  latency_p50_ms: ["Whole answer, p50", time], latency_p95_ms: ["Whole answer, p95", time],
  tokens_per_s_p50: ["Tokens per second of a stream, p50", count, "Tokens per second"],
  error_rate: ["Requests that fail by the server's fault", percent, "Errors and refusals per second"],
  queue_depth: ["Sequences in the queue", whole, "Sequences"],
  memory_mib: ["Memory", (mib) => size(mib * 2 ** 20), "Memory of the process"],
};

const tiles = TILES.map(([title, named, format]) => {
  const item = made("li", ""), line = made("p", ""), chart = new Chart(title, named.length, format, lookBack);
  const values = named.map(([, label], i) => {
    const value = document.createTextNode("–"), part = made("span", "", i ? "second" : "first");
    part.append(value, made("span", label && ` ${label}`));
    line.append(part);
    return value;
  });
  const kept = made("ul", "", "kept");
  item.append(made("h3", title), line, kept, chart.box);
  $("tiles").append(item);
  return { title, named, format, values, chart, kept };
});

function drawCharts() {
  const times = points.map((row) => row[0]);
  for (const { named, chart } of tiles) {
    const at = named.map(([name]) => columns.indexOf(name));
    chart.draw(times, at.map((column) => points.map((row) => row[column])));
  }
  $("moment").max = String(Math.max(0, points.length - 1));
  lookBack(seen === null ? null : points.indexOf(seen));
}

/** @type {(number | null)[] | null} */
let seen = null; // the point that is looked at; null: now
/** @type {(number | null)[]} */
let now = [];

/** Show what was at a point of the hour. @param {number | null} at null or beyond: now */
function lookBack(at) {
  seen = points[at ?? -1] ?? null;
  for (const { chart } of tiles) chart.mark(seen && at);
  $("moment").value = String(seen ? at : points.length);
  showValues();
}

function showValues() {
  const when = seen ? new Date(Number(seen[0]) * 1000).toLocaleTimeString() : "now", row = seen ?? now, told = [when];
  for (const { named, title, format, values } of tiles) {
    named.forEach(([name, label], i) => {
      const text = known(row[columns.indexOf(name)], format);
      tell(values[i], text);
      told.push(`${title}${label && `, ${label}`}: ${text}`);
    });
  }
  tell($("seen"), when);
  $("moment").setAttribute("aria-valuetext", told.join("; "));
}
$("moment").addEventListener("input", () => lookBack(Number($("moment").value)));
$("moment").addEventListener("blur", () => lookBack(null));

/** @param {Row} row */
function opener(row) {
  const id = String(row.id), button = made("button", id.slice(0, 12), "link");
  button.title = id;
  button.setAttribute("aria-label", `Stages of request ${id.slice(0, 12)}`);
  button.addEventListener("click", () => openRequest(id));
  return button;
}

/** @param {Row} row */
function makeRunning(row) {
  const line = emptyRow(10, [5, 6, 7, 8], opener(row)), button = /** @type {HTMLButtonElement} */ (made("button", "Cancel"));
  button.setAttribute("aria-label", `Cancel request ${String(row.id).slice(0, 12)}`);
  button.addEventListener("click", () => cancel(String(row.id), button));
  line.cells[9].append(button);
  return line;
}

/** @param {Row} row @returns {[string, number | null]} how far it is, in words and as a part of 1 */
function progressOf(row) {
  if (row.position !== null) return [row.position ? `${row.position} ahead` : "next", null];
  if (row.state === "prefill" && row.num_prefilled !== null) {
    const part = Math.min(1, Number(row.num_prefilled) / Math.max(1, Number(row.num_prompt_tokens)));
    return [percent(part), part];
  }
  return ["", null];
}

/** @param {HTMLCollectionOf<HTMLTableCellElement>} cells @param {Row} row */
function updateRunning(cells, row) {
  const [words, part] = progressOf(row);
  const texts = [null, row.tenant, row.model, row.state, words, whole(Number(row.num_prompt_tokens)),
    whole(Number(row.num_tokens)), known(row.tokens_per_s, count), time(Number(row.age_s) * 1000)];
  texts.forEach((text, i) => i && i !== 4 && tell(cells[i], String(text)));
  let meter = cells[4].querySelector("progress");
  if (part === null) tell(cells[4], words);
  else {
    if (!meter) {
      meter = document.createElement("progress");
      meter.setAttribute("aria-label", "prefill");
      cells[4].replaceChildren(meter, made("span", ""));
    }
    meter.value = part;
    tell(/** @type {Element} */ (cells[4].lastElementChild), ` ${words}`);
  }
}

/** @param {HTMLCollectionOf<HTMLTableCellElement>} cells @param {Row} row */
function updateEnded(cells, row) {
  const began = new Date(Number(row.started) * 1000).toLocaleTimeString();
  const texts = [null, row.tenant, row.model, began, row.status, row.reason ?? "", known(row.num_prompt_tokens, whole),
    known(row.num_tokens, whole), known(row.ttft_ms, time), time(Number(row.duration_ms))];
  texts.forEach((text, i) => i && tell(cells[i], String(text)));
  cells[5].className = row.has_failed ? "bad" : "";
}

/** @param {Row} row */
const limitOf = (row) => `${row.is_minimum ? "≥" : "≤"} ${(PROMISES[row.name]?.[1] ?? count)(Number(row.threshold))}`;

/** Each tile's SLOs, and whether they are met. @param {Row[]} promises */
function showKept(promises) {
  for (const { title, kept } of tiles) {
    const own = promises.filter((row) => PROMISES[row.name]?.[2] === title);
    const texts = own.map((row) => `${row.is_ok ? "✓" : "✗"} ${PROMISES[row.name][0].replace(`${title}, `, "")} ${limitOf(row)}`);
    if (texts.join("\n") === [...kept.children].map((one) => one.textContent).join("\n")) continue;
    kept.replaceChildren(...own.map((row, i) => made("li", texts[i], row.is_ok ? "good" : "bad")));
  }
}

/** @param {HTMLCollectionOf<HTMLTableCellElement>} cells @param {Row} row */
function updatePromise(cells, row) {
  const [words, format] = PROMISES[String(row.name)] ?? [String(row.name), count];
  tell(cells[0], words);
  tell(cells[1], known(row.value, format));
  tell(cells[2], limitOf(row));
  tell(cells[3], row.is_ok ? "✓ met" : "✗ missed");
  cells[3].className = row.is_ok ? "good" : "bad";
}

const steps = new StepLoop($("steps"), $("step")), blocks = new BlockGrid($("blocks"), $("block"));
/** What the colours of the blocks mean. */
function showLegend() {
  const marks = blocks.byTenant ? blocks.tenants().map(([name, hue]) => [name, "tenant", hue]) : STATES.map((name) => [name, name, ""]);
  const all = blocks.byTenant ? [["free", "free", ""], ...marks] : marks;
  if (all.join() === legend) return;
  legend = all.join();
  $("states").replaceChildren(...all.map(([name, kind, hue]) => {
    const mark = made("span", name, `mark ${kind}`);
    if (hue) mark.style.setProperty("--tenant", hue);
    return mark;
  }));
}
let legend = "";
showLegend();
$("by-tenant").addEventListener("change", () => {
  blocks.byTenant = $("by-tenant").checked;
  blocks.draw();
  showLegend();
});

/** @type {Row[]} */
let preempted = []; // the latest first

const CAUSES = {
  outranked: "the head of the queue goes first", paused: "it was paused, and others need its blocks",
  out_of_blocks: "no block was free", beams_apart: "its other beams wait",
};

/** @param {Frame} frame */
function showEngine(frame) {
  if (frame.columns) preempted = [];
  if (frame.steps.length || frame.blocks.length) $("engine").hidden = false;
  steps.add(frame.steps, Boolean(frame.columns));
  if (frame.blocks.length) {
    blocks.set(frame.blocks[frame.blocks.length - 1]);
    showLegend();
  }
  if (!frame.preempted.length && !frame.columns) return;
  /** @type {Row[]} */
  const more = frame.preempted.map(([at, request, index, cause, by]) => ({ id: `${at} ${request} ${index}`, at, request, cause, by }));
  preempted = more.reverse().concat(preempted).slice(0, MAX_PREEMPTED);
  $("preempted").hidden = !preempted.length;
  fill($("preempted").querySelector("tbody"), preempted,
    (row) => emptyRow(4, [], opener({ id: row.request })), (cells, row) => {
      tell(cells[1], new Date(Number(row.at) * 1000).toLocaleTimeString());
      tell(cells[2], CAUSES[/** @type {keyof typeof CAUSES} */ (row.cause)] ?? String(row.cause));
      tell(cells[3], row.by === row.request ? "itself" : String(row.by).slice(0, 12));
    }, "None.");
}

/** @param {HTMLCollectionOf<HTMLTableCellElement>} cells @param {Row} row */
function updateDevice(cells, row) {
  tell(cells[0], String(row.id));
  tell(cells[1], `${size(Number(row.memory_used_bytes))} of ${size(Number(row.memory_total_bytes))}`);
  tell(cells[2], known(row.utilization, percent));
}

/** @param {Frame} frame */
function show(frame) {
  if (frame.columns) [columns, points, ended] = [frame.columns, [], []];
  if (frame.points.length || frame.columns) {
    points = points.concat(frame.points).slice(-MAX_POINTS);
    drawCharts();
  }
  running = frame.requests;
  showEngine(frame);
  ended = frame.ended.reverse().concat(ended).slice(0, MAX_ENDED);
  tell($("about"), [frame.model, frame.version].filter(Boolean).join(" · "));
  tell($("state"), frame.state);
  now = frame.now;
  if (!seen) showValues();
  $("devices").hidden = !frame.devices.length;
  fill($("devices").querySelector("tbody"), frame.devices, () => emptyRow(3, [1, 2]), updateDevice, "None.");
  showKept(frame.promises);
  $("promises").hidden = !frame.promises.length;
  fill($("promises").querySelector("tbody"), frame.promises, () => emptyRow(4, [1, 2]), updatePromise, "None.");
  const more = frame.num_requests - frame.requests.length;
  tell($("num-running"), `${whole(frame.num_requests)}${more ? `, the oldest ${frame.requests.length} are shown` : ""}`);
  fill($("running").tBodies[0], frame.requests, makeRunning, updateRunning, "None.");
  if (frame.ended.length || frame.columns) showEnded();
  refreshTenants();
  if (shownId !== null && (frame.ended.some(isShown) || (frame.requests.some(isShown) && Date.now() - asked > 1000))) refresh();
}

function showEnded() {
  const wanted = $("search").value.trim().toLowerCase();
  const found = wanted ? ended.filter((one) => [one.id, one.alias, one.tenant, one.model, one.path, one.reason, one.status].some((text) => String(text).toLowerCase().includes(wanted))) : ended;
  const shown = found.slice(0, MAX_SHOWN), of = wanted ? `${found.length} of ${ended.length}` : `${ended.length} of the last thousand`;
  tell($("num-ended"), found.length > shown.length ? `${of}, the latest ${shown.length} are shown` : of);
  fill($("ended").tBodies[0], shown, (row) => emptyRow(10, [6, 7, 8, 9], opener(row)), updateEnded, wanted ? "No request matches." : "None yet.");
}
$("search").addEventListener("input", showEnded);

/** @param {string} path @param {RequestInit} [more] */
const ask = (path, more = {}) =>
  fetch(path, { ...more, cache: "no-store", credentials: "omit",
    headers: { ...(more.body ? { "content-type": "application/json" } : {}), ...(key === null ? {} : { authorization: `Bearer ${key}` }) } });

/** @param {string} id @param {HTMLButtonElement} button */
async function cancel(id, button) {
  button.disabled = true;
  const answer = await ask(`/admin/requests/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => null);
  button.disabled = answer !== null && answer.ok;
  const name = id.slice(0, 12);
  tell($("told"), answer === null ? "The server does not answer." : answer.ok ? `Request ${name} is cancelled.` : await refusal(answer));
  if (document.activeElement === document.body || document.activeElement === button) $("running-title").focus();
}

/** @param {string} id */
function openRequest(id) {
  shownId = id;
  tell($("detail-title"), `Request ${id}`);
  tell($("detail-about"), "");
  $("stages").replaceChildren();
  $("beside").replaceChildren();
  $("why").hidden = true;
  showWhy(null);
  if (!$("detail").open) $("detail").showModal();
  refresh();
}

/**
 * The requests of the same model that were in progress beside one, longest together first.
 * @param {string} id @param {string} model @param {number} began in ms since 1970 @param {number} length in ms
 */
function showBeside(id, model, began, length) {
  const now = Date.now();
  /** @type {Row[]} */
  const all = [...running.map((row) => ({ ...row, start: now - row.age_s * 1000 - began, end: now - began })),
    ...ended.map((row) => ({ ...row, start: row.started * 1000 - began, end: row.started * 1000 + row.duration_ms - began }))];
  const beside = all.filter((row) => row.id !== id && row.model === model && row.start < length && row.end > 0)
    .map((row) => ({ ...row, from: Math.max(0, row.start), together: Math.min(length, row.end) - Math.max(0, row.start) }))
    .sort((a, b) => b.together - a.together);
  tell($("beside-caption"), `Requests beside it: ${beside.length}${beside.length > MAX_BESIDE ? `, ${MAX_BESIDE} are shown` : ""}`);
  fill($("beside"), beside.slice(0, MAX_BESIDE), (row) => emptyRow(6, [2, 3, 4], opener(row)), (cells, row) => {
    [row.tenant, known(row.num_prompt_tokens, whole), known(row.num_tokens, whole), time(row.together)].forEach((text, i) => tell(cells[i + 1], text));
    cells[5].replaceChildren(bar(row.from, row.together, length));
  }, "None.");
}

/** @param {Row} row */
const isShown = (row) => row.id === shownId;

const WITHOUT = {
  neighbours_prompts: "other requests' prompts", preemption: "preemption", quota_pauses: "pauses of its quota",
  slow_reader: "its client's slow reading", slow_steps: "steps held up", cold_cache: "a cold cache",
  grammar: "the compilation of its grammar",
};

/** @param {any} found what /admin/requests/ID/why tells; null: nothing yet */
function showWhy(found) {
  tell($("verdict"), found === null ? "" : found.verdict);
  $("causes").hidden = !found?.has_verdict;
  if (!found?.has_verdict) return;
  const all = { cause: "all", cost_ms: Math.max(0, found.simulated_ms - found.without_all_ms), first_token_cost_ms: null };
  /** @type {Row[]} */
  const rows = [...found.causes, all].map((row) => ({ ...row, id: row.cause }));
  fill($("causes").querySelector("tbody"), rows, () => emptyRow(4, [1, 2]), (cells, row) => {
    tell(cells[0], WITHOUT[/** @type {keyof typeof WITHOUT} */ (row.cause)] ?? "all of these");
    tell(cells[1], time(row.cost_ms));
    tell(cells[2], known(row.first_token_cost_ms, time));
    cells[3].replaceChildren(...(row.cost_ms ? [bar(0, Math.min(row.cost_ms, found.time_ms), found.time_ms)] : []));
  }, "None.");
}

$("why").addEventListener("click", async () => {
  const id = shownId;
  $("why").disabled = true;
  tell($("verdict"), "Simulating …");
  const answer = await ask(`/admin/requests/${encodeURIComponent(String(id))}/why`).catch(() => null);
  $("why").disabled = false;
  if (id !== shownId) return;
  if (answer?.ok) showWhy(await answer.json());
  else tell($("verdict"), answer === null ? "The server does not answer." : await refusal(answer));
});

let isAsking = false, asked = 0;
async function refresh() {
  const id = shownId;
  if (isAsking || id === null) return;
  [isAsking, asked] = [true, Date.now()];
  const answer = await ask(`/admin/requests/${encodeURIComponent(id)}`).catch(() => null);
  isAsking = false;
  if (id !== shownId || answer === null) return;
  if (!answer.ok) return tell($("detail-about"), await refusal(answer));
  const told = await answer.json();
  const end = showStages($("stages"), told);
  const about = [told.path, told.model, told.tenant, told.error_code ?? told.finish_reason ?? told.state, time(end)];
  tell($("detail-about"), about.filter(Boolean).join(" · "));
  $("why").hidden = !isOver(told);
  showBeside(id, told.model ?? running.find(isShown)?.model, told.started * 1000, end);
}

const refreshTenants = tenants(ask);

const VIEWS = ["server", "playground", "tour"];
let view = VIEWS[0], isSignedOut = false, needsKey = false;
const openPlayground = playground(ask, () => key !== null);
tour(ask);

/** Show the view that the address names. Without the right `admin` the others than the first may still be of use. */
function showView() {
  const named = location.hash.slice(1) || VIEWS[0];
  if (VIEWS.includes(named)) view = named; // others are places within it
  for (const name of VIEWS) {
    $(name).hidden = name !== view;
    $(`to-${name}`).setAttribute("aria-current", String(name === view));
  }
  $("shown").hidden = isSignedOut;
  $("login").hidden = !isSignedOut || (view !== "server" && !needsKey);
  if (view === "playground" && !needsKey) openPlayground();
}

/** @param {string} why @param {boolean} isUnknown the key, or there is none: it is forgotten */
function askForKey(why, isUnknown) {
  if (isUnknown) key = null;
  [isSignedOut, needsKey] = [true, isUnknown];
  showView();
  tell($("state"), isUnknown ? "signed out" : "");
  tell($("refusal"), why);
  if (!$("login").hidden) $("key").focus();
}

async function look() {
  for (let wait = RETRY_MS; ;) {
    const answer = await ask("/dashboard/live").catch(() => null);
    if (answer !== null && (answer.status === 401 || answer.status === 403)) {
      return askForKey(key === null && answer.status === 401 ? "" : await refusal(answer), answer.status === 401);
    }
    if (answer?.ok) {
      [isSignedOut, needsKey] = [false, false];
      showView();
      wait = RETRY_MS;
      await readEvents(answer, (data) => show(JSON.parse(data))).catch(() => null);
    }
    tell($("state"), answer !== null && !answer.ok ? await refusal(answer) : "connecting again");
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, MAX_RETRY_MS);
  }
}

$("login").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  look();
});
$("detail").addEventListener("close", () => (shownId = null));
addEventListener("hashchange", showView);
look();
