// Elements of the page: found, made, changed only where they differ. Texts are set as text, never as markup.

/** @typedef {Record<string, any>} Row */

/** @param {string} id @returns {any} */
export const $ = (id) => document.getElementById(id);

/** @param {string} tag @param {string} text @param {string} [name] of its class */
export function made(tag, text, name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

/** @param {string} name of a colour in the style sheet */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

/** Change the text only where it differs: nothing is laid out or read out again. @param {Node} element @param {string} text */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make a table's rows those of the data, by key. A row that stays keeps its elements, and with them the focus.
 * @param {HTMLElement} body
 * @param {Row[]} rows
 * @param {(row: Row) => HTMLTableRowElement} make
 * @param {(cells: HTMLCollectionOf<HTMLTableCellElement>, row: Row) => void} update
 * @param {string} none what is told when there are none
 */
export function fill(body, rows, make, update, none) {
  const old = new Map([...body.children].map((one) => [/** @type {HTMLElement} */ (one).dataset.id, one]));
  rows.forEach((row, i) => {
    const id = String(row.id ?? row.name);
    let line = /** @type {HTMLTableRowElement | undefined} */ (old.get(id));
    old.delete(id);
    if (!line) {
      line = make(row);
      line.dataset.id = id;
    }
    update(line.cells, row);
    if (body.children[i] !== line) body.insertBefore(line, body.children[i] ?? null);
  });
  if (!rows.length && !old.delete("")) {
    const line = document.createElement("tr"), cell = /** @type {HTMLTableCellElement} */ (made("td", none, "none"));
    cell.colSpan = 10;
    line.dataset.id = "";
    line.append(cell);
    body.append(line);
  }
  old.forEach((line) => line.remove());
}

/** @param {number} numCells @param {number[]} numbers the columns of numbers @param {Element} [head] */
export function emptyRow(numCells, numbers, head) {
  const line = document.createElement("tr");
  const first = document.createElement("th");
  first.scope = "row";
  if (head) first.append(head);
  line.append(first);
  for (let i = 1; i < numCells; i++) line.append(made("td", "", numbers.includes(i) ? "number" : ""));
  return line;
}

/**
 * Read a stream of events to its end. @param {Response} answer
 * @param {(data: string, numBytes: number) => void} take each event's data; the bytes are those that came since the start
 */
export async function readEvents(answer, take) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader(), decoder = new TextDecoder();
  for (let text = "", numBytes = 0; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    numBytes += value.length;
    const events = (text + decoder.decode(value, { stream: true })).split("\n\n");
    text = events.pop() ?? "";
    for (const one of events) if (one.startsWith("data: ")) take(one.slice(6), numBytes);
  }
}

/** @param {Response} answer @returns {Promise<string>} */
export async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  return String(body?.error?.message ?? `The server answered ${answer.status}.`);
}

// Formats of numbers.

/** @param {number} value */
export const count = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(value % 1 ? 2 : 0));
/** @param {number} value */
export const whole = (value) => value.toLocaleString("en");
/** @param {number} ms */
export const time = (ms) => (ms >= 100_000 ? `${(ms / 1000).toFixed(0)} s` : ms >= 999.5 ? `${(ms / 1000).toFixed(2)} s` : `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`);
/** @param {number} part */
export const percent = (part) => `${(part * 100).toFixed(part < 0.1 ? 1 : 0)} %`;
/** @param {number} bytes */
export const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`);
/** @param {unknown} value @param {(value: any) => string} format */
export const known = (value, format) => (value === null || value === undefined ? "–" : format(value));
