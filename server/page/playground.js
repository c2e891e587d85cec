// The playground: a chat with every parameter, its tokens with what else was likely, and forks from any of them.

import { bar, isOver, showStages } from "/dashboard/chart.js";
import { $, count, made, percent, readEvents, refusal, tell, whole } from "/dashboard/elements.js";

/**
 * @typedef {{token: string, logprob: number, bytes: number[], top_logprobs?: Token[]}} Token
 * @typedef {{given: number[], tokens: Token[], text: string, calls: any[], reason: string | null, box: HTMLElement}} Choice
 *   given: the bytes of the text that it goes on with; text: what its deltas say, which is less than its tokens where a stop string ends it
 */

const PATH = "/v1/chat/completions";
const OWN = ["messages", "model", "stream"]; // set by the page
const FIRST = ["max_tokens", "temperature", "response_format", "tools"];
/** @type {Record<string, unknown>} what the page asks for where the visitor says nothing else */
const PRESET = { max_tokens: 256, logprobs: true, top_logprobs: 5, stream_options: { include_usage: true } };
const MOST_BITS = 4; // of entropy: the deepest tint
const NUM_LOOKS = 8, LOOK_MS = 250; // for the stages, once the answer is over

/** @param {number[]} bytes @returns {string | null} null: they end within a character */
function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

/** What it says before its token of this place. @param {Choice} choice @param {number} at */
const bytesOf = (choice, at) => new Uint8Array(choice.given.concat(...choice.tokens.slice(0, at).map((one) => one.bytes)));

/** The entropy in bits, at least: what is not among the likeliest counts as one token. @param {Token} token */
function entropyOf(token) {
  const likely = token.top_logprobs ?? [], parts = likely.map((one) => Math.exp(one.logprob));
  const rest = 1 - parts.reduce((a, b) => a + b, 0);
  return [...parts, rest].reduce((sum, part) => (part > 1e-9 ? sum - part * Math.log2(part) : sum), 0);
}

/** @type {Record<string, string>} what goes into the fields that are hard to guess */
const EXAMPLES = {
  response_format: '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"term": {"type": "string"}}, "required": ["term"]}}}',
  tools: '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"term": {"type": "string"}}, "required": ["term"]}}}]',
};

/** A text as it looks between quotes. @param {string} text */
const quoted = (text) => JSON.stringify(text).slice(1, -1) || "(nothing)";

/** @param {any} value @returns {string} a literal of Python: its strings may be written as JSON's */
function pythonOf(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonOf).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${pythonOf(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** @param {Record<string, any>} body @param {boolean} hasKey it is named, never shown */
function curlOf(body, hasKey) {
  const lines = [`curl -N ${location.origin}${PATH}`, `-H 'content-type: application/json'`];
  if (hasKey) lines.push(`-H "authorization: Bearer $API_KEY"`);
  return [...lines, `-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`].join(" \\\n  ");
}

/** @param {Record<string, any>} body @param {boolean} hasKey */
const pythonCodeOf = (body, hasKey) => `import json, os, urllib.request

body = {
${Object.entries(body).map(([name, value]) => `    ${JSON.stringify(name)}: ${pythonOf(value)},`).join("\n")}
}
headers = {"content-type": "application/json"${hasKey ? `, "authorization": f"Bearer {os.environ['API_KEY']}"` : ""}}
request = urllib.request.Request("${location.origin}${PATH}", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as answer:
    for line in answer:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                print(choice["delta"].get("content") or "", end="", flush=True)
`;

// The form of the parameters, from the server's own description.

/** @param {any} schema @param {any} all the document that its references are of @returns {any[]} what it may be, but for null */
function kindsOf(schema, all) {
  const found = schema.$ref ? schema.$ref.slice(2).split("/").reduce((/** @type {any} */ at, /** @type {string} */ name) => at[name], all) : schema;
  return found.anyOf ? found.anyOf.flatMap((/** @type {any} */ one) => kindsOf(one, all)) : found.type === "null" ? [] : [found];
}

/** @param {string} name @param {any[]} kinds @returns {HTMLElement} */
function fieldOf(name, kinds) {
  const label = made("label", `${name} `), [kind] = kinds, type = kinds.length === 1 ? kind.type : undefined;
  const options = type === "boolean" ? ["true", "false"] : kinds.length === 1 ? kind.enum : undefined;
  const input = /** @type {any} */ (document.createElement(options ? "select" : ["string", "number", "integer"].includes(type) ? "input" : "textarea"));
  if (options) input.append(...["", ...options].map((one) => made("option", one)));
  else if (type === "number" || type === "integer") {
    input.type = "number";
    input.step = type === "integer" ? "1" : "any";
    for (const [bound, at] of [["minimum", "min"], ["maximum", "max"]]) if (Math.abs(kind[bound]) < 2 ** 31 - 1) input[at] = kind[bound];
    input.placeholder = input.min && input.max ? `${input.min} to ${input.max}` : input.min ? `from ${input.min}` : "";
  } else if (input.localName === "textarea") {
    input.rows = FIRST.includes(name) ? 3 : 1;
    input.placeholder = EXAMPLES[name] ?? "JSON";
    if (FIRST.includes(name)) label.className = "wide";
  }
  input.name = name;
  input.spellcheck = false;
  input.dataset.kinds = kinds.map((one) => (one.enum ? "string" : one.type ?? "any")).join(" ");
  if (name in PRESET) input.value = typeof PRESET[name] === "object" ? JSON.stringify(PRESET[name]) : String(PRESET[name]);
  label.append(input);
  return label;
}

/** @param {any} input @returns {unknown} Raises SyntaxError: it is no JSON */
function valueOf(input) {
  const text = input.value.trim(), kinds = input.dataset.kinds.split(" ");
  if (kinds.join() === "string") return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    if ((kinds.includes("string") || kinds.includes("any")) && !/^[[{"]/.test(text)) return text;
    throw error;
  }
}

/**
 * The view's behaviour.
 * @param {(path: string, more?: RequestInit) => Promise<Response>} ask
 * @param {() => boolean} hasKey
 * @returns {() => Promise<void>} to be called when it is opened
 */
export function playground(ask, hasKey) {
  /** @type {Choice[]} */
  let choices = [];
  /** @type {{role: string, content: string}[]} */
  let turns = []; // before the message that is typed
  let sent = ""; // the message that was answered
  /** @type {AbortController | null} */
  let running = null;
  let numSent = 0;
  /** @type {HTMLElement | null} */
  let current = null; // the token that is looked at
  let isReady = false;

  /** @param {string} text */
  const say = (text) => tell($("chat-told"), text);
  /** @returns {any[]} */
  const inputs = () => [...$("chat-fields").querySelectorAll("input, select, textarea")];

  async function open() {
    if (isReady) return;
    isReady = true;
    const answers = await Promise.all([ask("/v1/models"), ask("/openapi.json")]).catch(() => []);
    const refused = answers.find((one) => !one.ok);
    isReady = answers.length === 2 && !refused;
    if (!isReady) return say(refused ? await refusal(refused) : "The server does not answer.");
    const [models, all] = await Promise.all(answers.map((one) => one.json()));
    const names = models.data.filter((/** @type {any} */ one) => !one.tasks || one.tasks.includes("generate"));
    $("chat-model").replaceChildren(...names.map((/** @type {any} */ one) => made("option", one.id)));
    const asked = all.paths[PATH].post.requestBody.content["application/json"].schema, [schema] = kindsOf(asked, all);
    const wanted = Object.keys(schema.properties).filter((name) => !OWN.includes(name));
    const rank = (/** @type {string} */ name) => (FIRST.indexOf(name) + 1 || FIRST.length + 1);
    wanted.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
    $("chat-fields").replaceChildren(...wanted.map((name) => fieldOf(name, kindsOf(schema.properties[name], all))));
    say("");
    showCode();
  }

  /** @param {string} [given] the beginning of the answer @returns {Record<string, any> | null} null: a field is no JSON, and that is told */
  function bodyOf(given) {
    /** @type {Record<string, any>} */
    const body = { model: $("chat-model").value, messages: [], stream: true };
    if ($("chat-system").value) body.messages.push({ role: "system", content: $("chat-system").value });
    body.messages.push(...turns, { role: "user", content: given === undefined ? $("chat-user").value : sent });
    for (const input of inputs()) {
      input.setCustomValidity("");
      if (!input.value.trim()) continue;
      try {
        body[input.name] = valueOf(input);
      } catch (error) {
        input.setCustomValidity(`${input.name} is no JSON: ${/** @type {Error} */ (error).message}`);
        return null;
      }
    }
    if (given !== undefined) {
      body.messages.push({ role: "assistant", content: given });
      body.continue_final_message = true;
    }
    return body;
  }

  /** @param {Record<string, any> | null} [body] */
  function showCode(body = bodyOf()) {
    const num = inputs().filter((one) => one.value.trim()).length;
    tell($("chat-set"), `${num} set`);
    if (body) tell($("code"), $("code-kind").value === "curl" ? curlOf(body, hasKey()) : pythonCodeOf(body, hasKey()));
  }

  /** @param {number} index @param {number[]} given */
  function choiceOf(index, given) {
    if (!choices[index]) {
      const box = made("div", "", "choice");
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", `Answer ${index + 1}, token by token`);
      if (given.length) box.append(made("span", textOf(given) ?? "", "given"));
      choices[index] = { given, tokens: [], text: "", calls: [], reason: null, box };
      $("chat-choices").append(box);
    }
    return choices[index];
  }

  /** @param {Choice} choice @param {Token} token */
  function addToken(choice, token) {
    const bits = entropyOf(token), at = choice.tokens.push(token) - 1;
    const shown = made("span", token.token.startsWith("bytes:") ? "\ufffd" : token.token, `token e${Math.min(4, Math.round((4 * bits) / MOST_BITS))}`);
    shown.dataset.at = String(at);
    shown.tabIndex = current || at ? -1 : 0;
    shown.setAttribute("role", "button");
    if (!token.token.trim()) shown.setAttribute("aria-label", quoted(token.token));
    choice.box.append(shown);
  }

  /** @param {any} event @param {number[]} given @returns {number} tokens that it brought */
  function take(event, given) {
    let num = 0;
    for (const one of event.choices ?? []) {
      const choice = choiceOf(one.index, given), delta = one.delta ?? {}, told = one.logprobs?.content;
      choice.text += delta.content ?? "";
      if (told) told.forEach((/** @type {Token} */ token) => addToken(choice, token));
      else if ((delta.content || delta.reasoning) && !choice.tokens.length) choice.box.append(document.createTextNode(delta.reasoning ?? delta.content));
      num += told?.length ?? (delta.content || delta.reasoning ? 1 : 0);
      for (const call of delta.tool_calls ?? []) {
        const known = (choice.calls[call.index] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      choice.reason = one.finish_reason ?? choice.reason;
    }
    return num;
  }

  /** What the choice answers: its text, or of one without any (calls, thoughts) its tokens. @param {Choice} choice */
  function answerOf(choice) {
    const decoded = (/** @type {Iterable<number>} */ bytes) => new TextDecoder().decode(new Uint8Array(bytes));
    return choice.text ? decoded(choice.given) + choice.text : decoded(bytesOf(choice, choice.tokens.length));
  }

  /** Strike the tokens out that a stop string has cut off. @param {Choice} choice */
  function strike(choice) {
    const whole = new TextDecoder().decode(bytesOf(choice, choice.tokens.length)), most = new TextEncoder().encode(answerOf(choice)).length;
    if (choice.reason !== "stop" || !whole.startsWith(answerOf(choice))) return;
    choice.box.querySelectorAll(".token").forEach((shown, at) => shown.classList.toggle("beyond", bytesOf(choice, at + 1).length > most));
  }

  function showTurns() {
    $("chat-turns").replaceChildren(...turns.map((one) => made("li", `${one.role === "user" ? "You" : "Model"}: ${one.content}`, one.role)));
    $("chat-anew").hidden = !turns.length;
    $("chat-reply").hidden = true;
    showCode();
  }

  /** Send the request, and show its answer as it comes. @param {number[]} [given] the bytes that the answer begins with */
  async function send(given = []) {
    running?.abort();
    const body = bodyOf(given.length ? textOf(given) ?? "" : undefined);
    if (!body) return $("chat").reportValidity();
    const own = (running = new AbortController()), began = performance.now(), number = ++numSent, message = body.messages.findLast((/** @type {any} */ one) => one.role === "user").content;
    showCode(body);
    $("chat-stop").disabled = false;
    $("chat-reply").hidden = true;
    $("chat-told").setAttribute("aria-live", "off"); // or each token's count is read out
    say("Waiting for the first token.");
    let num = 0, first = 0, id = null, told = "", isAnswered = false;
    /** @type {any} */
    let usage = null;
    const rate = () => (num > 1 ? `, ${count(((num - 1) * 1000) / (performance.now() - first))} tokens/s` : "");
    try {
      const answer = await ask(PATH, { method: "POST", body: JSON.stringify(body), signal: own.signal });
      if (own !== running) return;
      id = answer.headers.get("x-request-id");
      if (!answer.ok) told = await refusal(answer); // the answer before it stays
      else {
        [choices, current, sent, isAnswered] = [[], null, message, true];
        for (const name of ["chat-choices", "chat-stages", "alternatives"]) $(name).replaceChildren();
        ["token-about", "chat-whole"].forEach((name) => tell($(name), ""));
        $("chat-answer").hidden = false;
        await readEvents(answer, (data) => {
          const event = data === "[DONE]" || own !== running ? {} : JSON.parse(data);
          if (event.error) told = String(event.error.message);
          usage = event.usage ?? usage;
          num += take(event, given);
          if (num && !first) first = performance.now();
          if (num) say(`${whole(num)} tokens${rate()}`);
        });
      }
    } catch (error) {
      told = own.signal.aborted ? `Stopped after ${whole(num)} tokens.` : `The connection is lost: ${/** @type {Error} */ (error).message}`;
    }
    if (own !== running) return;
    running = null;
    $("chat-stop").disabled = true;
    $("chat-told").removeAttribute("aria-live");
    const reasons = choices.map((one) => one.reason).filter(Boolean).join(", ");
    const prompt = usage === null ? "" : `, after a prompt of ${whole(usage.prompt_tokens)}`;
    say(told || `${whole(num)} tokens${prompt}${rate()}, first after ${count(first - began)} ms, ended by ${reasons}.`);
    if (id === null || !isAnswered) return;
    for (const choice of choices) {
      if (choice.calls.length) choice.box.append(made("pre", JSON.stringify(choice.calls, null, 1)));
      strike(choice);
    }
    tell($("chat-whole"), choices.map(answerOf).join("\n"));
    $("chat-reply").hidden = !choices[0]?.text;
    await showWaterfall(id, () => number === numSent);
  }

  /** @param {string} id @param {() => boolean} isWanted */
  async function showWaterfall(id, isWanted) {
    for (let i = 0; i < NUM_LOOKS && isWanted(); i++) {
      const answer = await ask(`/v1/requests/${encodeURIComponent(id)}`).catch(() => null);
      if (!answer?.ok || !isWanted()) return;
      const told = await answer.json();
      showStages($("chat-stages"), told);
      if (isOver(told)) return;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }

  /** @param {EventTarget | null} target @returns {[Choice, Token, number, HTMLElement] | null} */
  function tokenAt(target) {
    const shown = /** @type {HTMLElement | null} */ (/** @type {HTMLElement | null} */ (target)?.closest?.(".token") ?? null);
    const choice = choices.find((one) => one?.box === shown?.parentElement);
    return shown && choice ? [choice, choice.tokens[Number(shown.dataset.at)], Number(shown.dataset.at), shown] : null;
  }

  /** @param {EventTarget | null} target */
  function look(target) {
    const found = tokenAt(target);
    if (!found || found[3] === current) return;
    const [choice, token, at, shown] = found;
    current?.removeAttribute("aria-current");
    $("chat-choices").querySelectorAll(".token[tabindex='0']").forEach((/** @type {HTMLElement} */ one) => (one.tabIndex = -1));
    (current = shown).setAttribute("aria-current", "true");
    shown.tabIndex = 0;
    const before = bytesOf(choice, at);
    tell($("token-about"), `Token ${at + 1}, ${quoted(token.token)}: ${percent(Math.exp(token.logprob))}, entropy at least ${entropyOf(token).toFixed(2)} bits. Choose another token, and the answer continues from there.`);
    $("alternatives").replaceChildren(...(token.top_logprobs ?? []).map((other) => {
      const line = made("li", ""), button = /** @type {HTMLButtonElement} */ (made("button", quoted(other.token))), part = Math.exp(other.logprob);
      const forked = [...before, ...other.bytes];
      button.disabled = !other.bytes.length || textOf(forked) === null;
      button.title = button.disabled ? "An answer cannot continue after part of a character, or a token without text." : "";
      button.setAttribute("aria-label", `Go on with ${quoted(other.token)}, ${percent(part)}`);
      button.addEventListener("click", () => send(forked));
      line.append(button, made("span", `${percent(part)}, logprob ${other.logprob.toFixed(2).replace("-0.00", "0")}`, "quiet"), bar(0, part, 1));
      return line;
    }));
  }

  const box = $("chat-choices");
  box.addEventListener("focusin", (/** @type {Event} */ event) => look(event.target));
  box.addEventListener("click", (/** @type {Event} */ event) => tokenAt(event.target)?.[3].focus());
  box.addEventListener("pointerover", (/** @type {Event} */ event) => {
    if (!$("chat-answer").contains(document.activeElement)) look(event.target); // one that has the focus stays
  });
  box.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const found = tokenAt(event.target), shown = found?.[3];
    const next = event.key === "ArrowRight" ? shown?.nextElementSibling : event.key === "ArrowLeft" ? shown?.previousElementSibling : null;
    if (next?.classList.contains("token")) /** @type {HTMLElement} */ (next).focus();
    const chooses = shown && (event.key === "Enter" || event.key === " ");
    if (chooses) $("alternatives").querySelector("button:enabled")?.focus();
    if (next || chooses) event.preventDefault();
  });
  $("chat").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    send();
  });
  $("chat").addEventListener("invalid", () => ($("chat").querySelector("details").open = true), true); // or nobody sees why
  $("chat").addEventListener("input", () => showCode());
  $("code-kind").addEventListener("change", () => showCode());
  $("chat").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("chat").requestSubmit();
  });
  $("chat-stop").addEventListener("click", () => running?.abort());
  $("chat-reply").addEventListener("click", () => {
    turns.push({ role: "user", content: sent }, { role: "assistant", content: answerOf(choices[0]) });
    $("chat-user").value = "";
    showTurns();
    $("chat-user").focus();
  });
  $("chat-anew").addEventListener("click", () => {
    turns = [];
    showTurns();
    $("chat-user").focus();
  });
  $("code-copy").addEventListener("click", async () => {
    const isCopied = await navigator.clipboard?.writeText($("code").textContent).then(() => true, () => false);
    if (!isCopied) getSelection()?.selectAllChildren($("code"));
    say(isCopied ? "Copied." : "The text is selected: this browser does not let the page copy it.");
  });
  return open;
}
