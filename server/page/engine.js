// The step loop and the KV blocks, each on one canvas. What is under the pointer, or chosen by the arrow keys, is told in words.

import { colour } from "/dashboard/elements.js";

/** @typedef {[number, number, number, number, number | null]} Step at, prompt tokens, own tokens, ms, predicted ms */
/** @typedef {{cells: string, host_cells: string, num_host_slots: number, owners: [number, string][]}} BlockMap */

const MAX_STEPS = 1024, STEP_PX = 5, OWNER_BIT = 3, LEAST_CELL = 4, MOST_CELL = 14;
export const STATES = ["free", "cached", "used", "shared", "paused", "offloaded"];

/** @param {string} coded base64 of little-endian uint16 */
function cellsOf(coded) {
  const bytes = Uint8Array.from(atob(coded), (one) => one.charCodeAt(0)), view = new DataView(bytes.buffer);
  return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
}

/** A canvas of things in order, one of which is chosen. */
class Picture {
  /** @param {HTMLCanvasElement} canvas @param {Element} words */
  constructor(canvas, words) {
    this.canvas = canvas;
    this.words = words;
    this.chosen = -1;
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && this.choose(-1));
    canvas.addEventListener("blur", () => {
      words.removeAttribute("aria-live");
      this.choose(-1);
    });
    canvas.addEventListener("focus", () => {
      words.setAttribute("aria-live", "polite");
      if (this.chosen < 0) this.choose(this.first());
    });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.perRow(), ArrowDown: this.perRow(), Home: -1e9, End: 1e9 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(this.count() - 1, this.chosen + by)));
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** @param {number} chosen */
  choose(chosen) {
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    this.draw();
  }

  /** @param {(pen: CanvasRenderingContext2D, width: number, height: number) => void} paint in CSS pixels */
  painted(paint) {
    const { canvas } = this, scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    const pen = canvas.getContext("2d");
    if (!pen || !width) return;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    paint(pen, width, height);
    const text = this.chosen >= 0 && this.chosen < this.count() ? this.tell(this.chosen) : this.summary();
    if (this.words.textContent !== text) this.words.textContent = text;
  }

  first() { return 0; }
  perRow() { return 1; }
  count() { return 0; }
  /** @param {number} _x @param {number} _y @returns {number} */
  at(_x, _y) { return -1; }
  draw() {}
  /** @param {number} i @returns {string} */
  tell(i) { return String(i); }
  summary() { return ""; }
}

export class StepLoop extends Picture {
  /** @type {Step[]} */
  steps = [];
  /** @type {Step[]} */
  waiting = []; // while one is chosen, the picture stays

  /** @param {Step[]} more @param {boolean} isNew the first of this stream */
  add(more, isNew) {
    if (isNew) this.steps = this.waiting = [];
    if (!more.length && !isNew) return;
    if (this.chosen < 0) this.steps = this.steps.concat(this.waiting.splice(0), more).slice(-MAX_STEPS);
    else this.waiting = this.waiting.concat(more).slice(-MAX_STEPS);
    this.draw();
  }

  first() { return this.count() - 1; }
  count() { return this.steps.length; }
  /** What the full heights stand for: tokens, and ms, which longer steps exceed. @param {Step[]} shown */
  scales(shown) {
    const times = shown.map((one) => one[3]).sort((a, b) => a - b);
    return [Math.max(1, ...shown.map(([, prompt, own]) => prompt + own)), Math.max(0.1, 1.5 * (times[Math.floor(0.95 * times.length)] ?? 0))];
  }
  shown() { return Math.min(this.steps.length, Math.floor(this.canvas.clientWidth / STEP_PX)); }
  /** @param {number} x */
  at(x) {
    const i = this.steps.length - 1 - Math.floor((this.canvas.clientWidth - x) / STEP_PX);
    return i >= this.steps.length - this.shown() && i < this.steps.length ? i : -1;
  }

  draw() {
    const shown = this.steps.slice(-this.shown() || this.steps.length);
    const [mostTokens, mostMs] = this.scales(shown);
    this.painted((pen, width, height) => {
      const half = height / 2 - 6;
      shown.forEach(([, prompt, own, ms, predicted], i) => {
        const x = width - STEP_PX * (shown.length - i), at = this.steps.length - shown.length + i;
        const own_px = half * own / mostTokens, prompt_px = half * prompt / mostTokens, ms_px = half * Math.min(1, ms / mostMs);
        if (at === this.chosen) {
          pen.fillStyle = colour("--line");
          pen.fillRect(x - 1, 0, STEP_PX + 1, height);
        }
        pen.fillStyle = colour("--second");
        pen.fillRect(x, half - own_px, STEP_PX - 1, own_px);
        pen.fillStyle = colour("--first");
        pen.fillRect(x, half - own_px - prompt_px, STEP_PX - 1, prompt_px);
        pen.fillStyle = colour("--quiet");
        pen.fillRect(x, height - ms_px, STEP_PX - 1, ms_px);
        if (predicted !== null) {
          pen.fillStyle = colour("--bad");
          pen.fillRect(x, height - half * Math.min(1, predicted / mostMs) - 1, STEP_PX - 1, 2);
        }
      });
      pen.fillStyle = colour("--line");
      pen.fillRect(0, half, width, 1);
    });
  }

  /** @param {number} i */
  tell(i) {
    const [at, prompt, own, ms, predicted] = this.steps[i];
    const guess = predicted === null ? "no prediction yet" : `predicted ${predicted.toFixed(1)} ms`;
    return `${new Date(at * 1000).toLocaleTimeString()}: ${prompt} prompt and ${own} decoded tokens in ${ms.toFixed(1)} ms, ${guess}`;
  }

  summary() {
    const shown = this.steps.slice(-this.shown() || this.steps.length);
    if (!shown.length) return "No step so far.";
    const times = shown.map((one) => one[3]).sort((a, b) => a - b), known = shown.filter((one) => one[4] !== null);
    const off = known.map((one) => Math.abs(Number(one[4]) - one[3]) / one[3]).sort((a, b) => a - b);
    const error = off.length ? `; half of the predictions are off by ${(off[off.length >> 1] * 100).toFixed(0)} % at most` : "";
    const [tokens, ms] = this.scales(shown);
    return `The last ${shown.length} steps: median ${times[times.length >> 1].toFixed(1)} ms, longest ${times[times.length - 1].toFixed(1)} ms${error}. The highest bars are ${tokens} tokens, and ${ms.toFixed(0)} ms or more.`;
  }
}

export class BlockGrid extends Picture {
  cells = new Uint16Array();
  numDevice = 0;
  numHostSlots = 0;
  byTenant = false;
  /** @type {[number, string][]} */
  owners = [];

  /** @param {BlockMap} map */
  set(map) {
    const device = cellsOf(map.cells), host = cellsOf(map.host_cells);
    this.cells = new Uint16Array(device.length + host.length);
    this.cells.set(device);
    this.cells.set(host, device.length);
    [this.numDevice, this.numHostSlots, this.owners] = [device.length, map.num_host_slots, map.owners];
    this.draw();
  }

  count() { return this.cells.length; }
  size() {
    const side = Math.sqrt(this.canvas.clientWidth * 160 / Math.max(1, this.count()));
    return Math.max(LEAST_CELL, Math.min(MOST_CELL, Math.floor(side)));
  }
  perRow() { return Math.max(1, Math.floor(this.canvas.clientWidth / this.size())); }
  /** @param {number} x @param {number} y */
  at(x, y) {
    const size = this.size(), column = Math.floor(x / size), i = Math.floor(y / size) * this.perRow() + column;
    return column < this.perRow() && i < this.count() ? i : -1;
  }

  /** Of each state: how many. */
  counts() {
    const found = STATES.map(() => 0);
    for (const cell of this.cells) found[cell & (1 << OWNER_BIT) - 1]++;
    return found;
  }

  /** @returns {[string, string][]} each with its colour */
  tenants() { return [...new Set(this.owners.map(([, name]) => name))].sort().map((name, i) => [name, `hsl(${i * 137 % 360} 60% 50%)`]); }

  draw() {
    const size = this.size(), perRow = this.perRow(), rows = Math.ceil(this.count() / perRow);
    const height = `${Math.max(1, rows) * size}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
    const states = STATES.map((name) => colour(`--block-${name}`)), tenants = new Map(this.tenants());
    const hues = this.owners.map(([, name]) => tenants.get(name) ?? "");
    this.painted((pen) => {
      this.cells.forEach((cell, i) => {
        const state = cell & (1 << OWNER_BIT) - 1, x = i % perRow * size, y = Math.floor(i / perRow) * size;
        pen.fillStyle = this.byTenant && state ? hues[cell >> OWNER_BIT] : states[state];
        pen.fillRect(x, y, size - 1, size - 1);
        if (i === this.chosen) {
          pen.strokeStyle = colour("--text");
          pen.strokeRect(x - 0.5, y - 0.5, size, size);
        }
      });
    });
  }

  /** @param {number} i */
  tell(i) {
    const state = STATES[this.cells[i] & (1 << OWNER_BIT) - 1], [number, name] = this.owners[this.cells[i] >> OWNER_BIT];
    const where = i < this.numDevice ? `Block ${i}` : `Copy ${i - this.numDevice} on the host`;
    return state === "free" ? `${where}: free.` : `${where}: ${state}, ${number ? `prefix ${number}` : "in no shared prefix"}, of ${name}.`;
  }

  summary() {
    const found = this.counts().slice(0, -1).map((count, i) => `${count} ${STATES[i]}`).join(", ");
    const host = this.numHostSlots ? `; ${this.cells.length - this.numDevice} of ${this.numHostSlots} places on the host are taken` : "";
    return `${this.numDevice} blocks: ${found}${host}.`;
  }
}
