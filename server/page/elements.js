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
