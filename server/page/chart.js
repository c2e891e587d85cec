// Lines over an hour, by uPlot, and bars of a waterfall, as SVG. Colours are the style sheet's.

import { size as bytes, colour, emptyRow, made, tell, time } from "/dashboard/elements.js";

const SVG = "http://www.w3.org/2000/svg";
const HOUR_S = 3600, LEAST_S = 300; // a young server's first minutes fill the width
const POWERS = Array.from({ length: 50 }, (_, i) => 2 ** i);
const MOUSE = ["mousedown", "mouseup", "click", "dblclick", "mousemove", "mouseleave", "mouseenter"];
const MOST_APART_S = 15; // two points with the server there all the time

/**
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @returns {SVGElement}
 */
export function element(name, attributes) {
  const found = /** @type {SVGElement} */ (document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value));
  return found;
}

/** Lines over an hour, by uPlot, with axes. What is at the pointer is told by `point`. */
export class Chart {
  /** @type {uPlot | null} */
  plot = null;
  /** @type {uPlot.AlignedData} */
  data = [[]];

  /**
   * @param {string} label what it shows, for those who do not see it
   * @param {number} numLines one or two
   * @param {(value: number) => string} format
   * @param {(at: number | null) => void} point is given the index at the pointer; null: it has left
   */
  constructor(label, numLines, format, point) {
    this.label = label;
    this.numLines = numLines;
    this.format = format;
    this.point = point;
    this.box = made("div", "", "chart");
    this.box.setAttribute("role", "img");
    new ResizeObserver(() => this.fit()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot?.redraw());
  }

  /** As large as its box; made once this is seen. */
  fit() {
    const size = { width: this.box.clientWidth, height: this.box.clientHeight };
    if (!size.width) return;
    if (this.plot) this.plot.setSize(size);
    else {
      const { over } = (this.plot = new uPlot(this.options(size), this.data, this.box));
      over.addEventListener("pointermove", (event) => this.point(this.plot?.posToIdx(event.offsetX) ?? null));
      over.addEventListener("pointerleave", () => this.point(null));
    }
  }

  /** @param {{width: number, height: number}} size @returns {uPlot.Options} */
  options(size) {
    const axis = { stroke: () => colour("--quiet"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "10px system-ui", gap: 4 };
    const lines = ["--first", "--second"].slice(0, this.numLines).map((name, i) => ({ stroke: () => colour(name), width: 1.5, dash: i ? [4, 2] : [], gaps: gapsOf }));
    return {
      ...size, padding: [8, 16, 0, 0], legend: { show: false }, series: [{}, ...lines],
      cursor: { y: false, bind: Object.fromEntries(MOUSE.map((name) => [name, () => null])) }, // it is where mark() sets it
      scales: { x: { range: (_, first, last) => [Math.max(last - HOUR_S, Math.min(first, last - LEAST_S)), last] }, y: { range: (_, _least, most) => [0, 1.05 * most || 1] } },
      axes: [
        { ...axis, size: 20, space: 60, values: (_, all) => all.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" })) },
        { ...axis, size: 52, space: 26, ...(this.format === bytes ? { incrs: POWERS } : {}), values: (_, all) => all.map(this.format) },
      ],
    };
  }

  /**
   * @param {(number | null)[]} times
   * @param {(number | null)[][]} columns
   */
  draw(times, columns) {
    this.data = /** @type {uPlot.AlignedData} */ ([times, ...columns]);
    this.plot?.setData(this.data);
    const known = columns.flat().filter((one) => one !== null), most = known.reduce((a, b) => Math.max(a, b), 0);
    this.box.setAttribute("aria-label", `${this.label} in the last hour: ${known.length ? `at most ${this.format(most)}` : "nothing measured"}`);
  }

  /** Mark a point of all. @param {number | null} at */
  mark(at) {
    const left = at === null || !this.plot ? -10 : this.plot.valToPos(this.data[0][at], "x");
    this.plot?.setCursor({ left, top: left < 0 ? -10 : 0 }, false);
  }
}

/** Where a value is missing, or the server was not there. @type {uPlot.Series.GapsRefiner} */
const gapsOf = (plot, _, first, last, gaps) => {
  const [times] = plot.data, at = (/** @type {number} */ i) => Math.round(plot.valToPos(times[i], "x", true));
  for (let i = first + 1; i <= last; i++) if (times[i] - times[i - 1] > MOST_APART_S) gaps.push([at(i - 1), at(i)]);
  return gaps.sort(([a], [b]) => a - b);
};

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
