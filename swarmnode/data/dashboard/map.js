// The coverage map: a cell an expert, a row a layer, colour = replicas. Pointer, touch and keyboard.

import { byId, element, onTheme, setText, sizedContext, themeColour } from "./elements.js";
import { cellText, coverage, layerNumbers, percent } from "./state.js";

const LABEL_WIDTH = 30;
const MIN_CELL = 3;
const MAX_CELL = 28;
const HEIGHT = 400;
const PAGE_LAYERS = 8;
const STEPS = ["none", "1", "2", "3", "4 or more"];

export class CoverageMap {
  #map = byId("map");
  #frame = byId("map-frame");
  #canvas = byId("map-canvas");
  #cursor = byId("map-cursor");
  #tip = byId("map-tip");
  #live = byId("map-live");
  #onChoice;
  #state = null;
  #layers = [];
  #context = null;
  #cell = { width: 0, height: 0 };
  #at = { row: 0, expert: 0 };
  #said = "";
  #colours = [];
  #text = "";
  #ground = "";

  /** `onChoice(layer)`: Enter, or a click on a cell. */
  constructor(onChoice) {
    this.#onChoice = onChoice;
    this.#map.addEventListener("keydown", (event) => this.#key(event));
    this.#map.addEventListener("focus", () => this.#moveTo(this.#at.row, this.#at.expert));
    this.#map.addEventListener("blur", () => (this.#cursor.hidden = true));
    this.#canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.#canvas.addEventListener("pointerleave", () => (this.#tip.hidden = true));
    this.#canvas.addEventListener("click", (event) => this.#click(event));
    addEventListener("keydown", (event) => event.key === "Escape" && (this.#tip.hidden = true));
    new ResizeObserver(() => this.#layout()).observe(this.#frame);
    onTheme(() => this.#redraw());
  }

  /** Show a state; of a delta, only the rows that it changed are drawn. */
  show(state, delta) {
    const isNew = !this.#state || !delta || delta.model;
    this.#state = state;
    if (isNew) {
      this.#layers = layerNumbers(state);
      this.#layout();
    } else if (delta.layers) {
      for (const layer of Object.keys(delta.layers)) this.#drawRow(this.#layers.indexOf(Number(layer)));
    }
    if (isNew || delta.layers) this.#summarise();
    if (!this.#cursor.hidden && (isNew || delta.layers || delta.nodes || delta.gone)) this.#say();
  }

  /** Say when the map was on the screen, in ms since the page was asked for: tests and benchmarks read it. */
  markDrawn() {
    this.#map.dataset.drawnMs = performance.now().toFixed(0);
  }

  #summarise() {
    const { held, twice, all } = coverage(this.#state);
    setText(
      byId("map-summary"),
      `${held.toLocaleString("en")} of ${all.toLocaleString("en")} experts (${percent(held, all)}) are held by workers, ` +
        `${percent(twice, all)} twice. ${this.#layers.length} layers of ${this.#state.model.n_expert} experts; ` +
        "whatever nobody holds, this backbone computes.",
    );
  }

  #layout() {
    if (!this.#state) return;
    const room = this.#frame.clientWidth - LABEL_WIDTH;
    const { n_expert } = this.#state.model;
    this.#cell.width = clamp(Math.floor(room / n_expert), MIN_CELL, MAX_CELL);
    this.#cell.height = clamp(Math.floor(HEIGHT / this.#layers.length), 6, MAX_CELL);
    const width = LABEL_WIDTH + this.#cell.width * n_expert;
    const height = this.#cell.height * this.#layers.length;
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${height}px`;
    this.#context = sizedContext(this.#canvas, width, height);
    this.#redraw();
    if (!this.#cursor.hidden) this.#place();
  }

  #redraw() {
    if (!this.#context) return;
    this.#colours = STEPS.map((_, step) => themeColour(`--map-${step}`));
    this.#text = themeColour("--quiet");
    this.#ground = themeColour("--surface");
    for (let row = 0; row < this.#layers.length; row++) this.#drawRow(row);
    this.#drawLabels();
    this.#drawLegend();
  }

  #drawRow(row) {
    const { width, height } = this.#cell;
    const context = this.#context;
    const digits = this.#state.layers[this.#layers[row]];
    const top = row * height;
    context.fillStyle = this.#ground;
    context.fillRect(LABEL_WIDTH, top, digits.length * width, height);
    const gap = width >= 5 ? 1 : 0;
    let first = 0;
    while (first < digits.length) {
      let last = first + 1; // without gaps, neighbours of one colour are one rectangle
      while (!gap && last < digits.length && digits[last] === digits[first]) last++;
      context.fillStyle = this.#colours[Math.min(digits.charCodeAt(first) - 48, STEPS.length - 1)];
      context.fillRect(LABEL_WIDTH + first * width, top, (last - first) * width - gap, height - 1);
      first = last;
    }
  }

  #drawLabels() {
    const { height } = this.#cell;
    const context = this.#context;
    context.fillStyle = this.#ground;
    context.fillRect(0, 0, LABEL_WIDTH, height * this.#layers.length);
    context.fillStyle = this.#text;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "top";
    for (let row = 0; row < this.#layers.length; row += Math.ceil(14 / height)) {
      context.fillText(String(this.#layers[row]), LABEL_WIDTH - 6, row * height);
    }
  }

  #drawLegend() {
    const items = STEPS.map((name, step) => {
      const swatch = element("canvas", { "aria-hidden": "true" });
      const context = sizedContext(swatch, 14, 14);
      context.fillStyle = this.#colours[step];
      context.fillRect(0, 0, 14, 14);
      return element("li", {}, swatch, name);
    });
    byId("map-legend").replaceChildren(...items);
  }

  #cellAt(event) {
    if (!this.#state) return null;
    const box = this.#canvas.getBoundingClientRect();
    const expert = Math.floor((event.clientX - box.left - LABEL_WIDTH) / this.#cell.width);
    const row = Math.floor((event.clientY - box.top) / this.#cell.height);
    const isInside = expert >= 0 && expert < this.#state.model.n_expert && row >= 0 && row < this.#layers.length;
    return isInside ? { row, expert } : null;
  }

  #hover(event) {
    const at = this.#cellAt(event);
    this.#tip.hidden = !at;
    if (!at) return;
    setText(this.#tip, cellText(this.#state, this.#layers[at.row], at.expert));
    const { offsetWidth: width, offsetHeight: height } = this.#tip;
    this.#tip.style.left = `${clamp(event.clientX + 14, 0, innerWidth - width - 4)}px`;
    this.#tip.style.top = `${event.clientY + 18 + height < innerHeight ? event.clientY + 18 : event.clientY - height - 10}px`;
  }

  #click(event) {
    const at = this.#cellAt(event);
    if (!at) return;
    this.#moveTo(at.row, at.expert);
    this.#onChoice(this.#layers[at.row], false);
  }

  #key(event) {
    if (!this.#state || event.altKey || event.metaKey) return;
    const last = { row: this.#layers.length - 1, expert: this.#state.model.n_expert - 1 };
    const { row, expert } = this.#at;
    const all = event.ctrlKey;
    const moves = {
      ArrowLeft: [row, expert - 1],
      ArrowRight: [row, expert + 1],
      ArrowUp: [row - 1, expert],
      ArrowDown: [row + 1, expert],
      PageUp: [row - PAGE_LAYERS, expert],
      PageDown: [row + PAGE_LAYERS, expert],
      Home: [all ? 0 : row, 0],
      End: [all ? last.row : row, last.expert],
    };
    if (event.key === "Enter") this.#onChoice(this.#layers[row], true);
    else if (moves[event.key]) this.#moveTo(clamp(moves[event.key][0], 0, last.row), clamp(moves[event.key][1], 0, last.expert));
    else return;
    event.preventDefault();
  }

  #moveTo(row, expert) {
    if (!this.#state) return;
    this.#at = { row: Math.min(row, this.#layers.length - 1), expert };
    this.#cursor.hidden = false;
    this.#place();
    this.#say();
  }

  #place() {
    const { width, height } = this.#cell;
    const left = LABEL_WIDTH + this.#at.expert * width;
    Object.assign(this.#cursor.style, {
      left: `${left}px`,
      top: `${this.#at.row * height}px`,
      width: `${width}px`,
      height: `${height}px`,
    });
    if (left < this.#frame.scrollLeft + LABEL_WIDTH || left + width > this.#frame.scrollLeft + this.#frame.clientWidth) {
      this.#frame.scrollLeft = left - this.#frame.clientWidth / 2;
    }
  }

  #say() {
    const text = cellText(this.#state, this.#layers[this.#at.row], this.#at.expert);
    if (text === this.#said) return;
    this.#said = text;
    setText(this.#live, text);
  }
}

function clamp(value, least, most) {
  return Math.max(least, Math.min(most, value));
}
