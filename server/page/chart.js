// Lines over an hour, and bars of a waterfall, as SVG. Colours are the style sheet's.

import { emptyRow, tell, time } from "/dashboard/elements.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 360, HEIGHT = 60, HOUR_S = 3600, LEAST_S = 300;

/**
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @returns {SVGElement}
 */
export function element(name, attributes) {
  const made = /** @type {SVGElement} */ (document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

/**
 * A path through the points; it is broken where a value is missing, or where the server was not there.
 * @param {(number | null)[]} times seconds
 * @param {(number | null)[]} values
 * @param {number} end the right edge, in seconds
 * @param {number} span of the whole width, in seconds
 * @param {number} most the upper edge
 * @returns {string}
 */
function pathOf(times, values, end, span, most) {
  let path = "", last = -Infinity;
  times.forEach((at, i) => {
    const value = values[i];
    if (at === null || value === null || value === undefined ) return;
    const x = WIDTH * (1 - (end - at) / span), y = HEIGHT - 2 - (HEIGHT - 4) * value / most;
    path += `${at - last > 15 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (at - last > 15) path += "h.6"; // so that one point alone is seen
    last = at;
  });
  return path;
}

export class Chart {
  /** @param {string} label what it shows, for those who do not see it */
  constructor(label) {
    this.label = label;
    this.svg = element("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg.append(element("path", { class: "axis", d: `M0 ${HEIGHT - 1}H${WIDTH}` }));
    this.lines = ["first", "second"].map((name) => element("path", { class: name }));
    this.svg.append(...this.lines);
  }

  /**
   * @param {(number | null)[]} times
   * @param {(number | null)[][]} columns one or two
   * @param {(value: number) => string} format
   */
  draw(times, columns, format) {
    const end = times.at(-1) ?? 0, first = times[0] ?? 0;
    const span = Math.min(HOUR_S, Math.max(LEAST_S, end - first)); // a young server's first minutes fill the width
    const known = columns.flat().filter((one) => one !== null);
    const most = known.reduce((a, b) => Math.max(a, b), 0);
    columns.forEach((values, i) => this.lines[i].setAttribute("d", pathOf(times, values, end, span, most || 1)));
    this.svg.setAttribute("aria-label", `${this.label} in the last hour: ${known.length ? `at most ${format(most)}` : "nothing measured"}`);
  }
}

/**
 * One stage of a waterfall.
 * @param {number} start
 * @param {number} length
 * @param {number} whole all in the same unit
 * @returns {SVGElement}
 */
export function bar(start, length, whole) {
  const svg = element("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  const width = Math.max(0.5, 100 * length / whole);
  svg.append(element("rect", { x: Math.min(100 - width, 100 * start / whole), y: 0, width, height: 8 }));
  return svg;
}

/**
 * A request's stages as the rows of a waterfall; of one in progress, the current stage lasts until now.
 * @param {HTMLElement} body
 * @param {any} told what /v1/requests/ID tells
 * @returns {number} the request's whole time, in ms
 */
export function showStages(body, told) {
  const last = told.stages.at(-1), left = last ? last.start_ms + last.duration_ms : 0;
  const current = { stage: told.state, start_ms: left, duration_ms: Math.max(0, Date.now() - told.started * 1000 - left) };
  /** @type {{stage: string, start_ms: number, duration_ms: number}[]} */
  const stages = isOver(told) ? told.stages : [...told.stages, current];
  const end = Math.max(1e-3, ...stages.map((one) => one.start_ms + one.duration_ms));
  body.replaceChildren(...stages.map((one) => {
    const line = emptyRow(4, [1, 2]);
    [one.stage.replaceAll("_", " "), time(one.start_ms), time(one.duration_ms)].forEach((text, i) => tell(line.cells[i], text));
    line.cells[3].append(bar(one.start_ms, one.duration_ms, end));
    return line;
  }));
  return end;
}

/** @param {any} told what /v1/requests/ID tells */
export const isOver = (told) => told.state === "done" || told.state === "failed";
