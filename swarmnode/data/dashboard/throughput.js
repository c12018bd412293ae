// Two curves over the last minutes: tokens/s, and rows/s of all workers.

import { byId, onTheme, setText, sizedContext, themeColour } from "./elements.js";
import { rateText } from "./state.js";

const HEIGHT = 96;
const MINUTES = 10;

class Curve {
  #canvas;
  #now;
  #what;
  #values = [];
  most = 60 * MINUTES;

  constructor(name, what) {
    this.#canvas = byId(`${name}-chart`);
    this.#now = byId(`${name}-now`);
    this.#what = what;
    new ResizeObserver(() => this.draw()).observe(this.#canvas.parentElement);
    onTheme(() => this.draw());
  }

  set(values) {
    this.#values = values;
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > this.most) this.#values.shift();
  }

  draw() {
    const values = this.#values;
    const now = values.at(-1) ?? 0;
    const highest = Math.max(0, ...values);
    setText(this.#now, rateText(now));
    const label = `${this.#what} over the last ${MINUTES} minutes: now ${rateText(now)}, at most ${rateText(highest)}`;
    this.#canvas.setAttribute("aria-label", label);
    const width = this.#canvas.parentElement.clientWidth;
    const context = sizedContext(this.#canvas, width, HEIGHT);
    this.#frame(context, width, highest);
    if (values.length < 2) return;
    const step = width / (this.most - 1);
    const start = width - (values.length - 1) * step;
    const height = (value) => HEIGHT - 2 - (highest ? (value / highest) * (HEIGHT - 18) : 0);
    context.beginPath();
    values.forEach((value, index) => context.lineTo(start + index * step, height(value)));
    context.strokeStyle = themeColour("--curve");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(width, HEIGHT);
    context.lineTo(start, HEIGHT);
    context.fillStyle = themeColour("--curve-fill");
    context.fill();
  }

  #frame(context, width, highest) {
    context.strokeStyle = themeColour("--line");
    context.strokeRect(0.5, 0.5, width - 1, HEIGHT - 1);
    context.fillStyle = themeColour("--quiet");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(`at most ${rateText(highest)}; the last ${MINUTES} minutes`, 5, 3);
  }
}

export class ThroughputCharts {
  #tokens = new Curve("tokens", "Tokens per second");
  #pairs = new Curve("pairs", "Rows per second from workers");
  #n = 0;

  show(state, delta) {
    if (!delta) {
      const { history } = state;
      this.#tokens.set(history.tokens.slice());
      this.#pairs.set(history.pairs.slice());
      this.#n = history.n;
    } else if (state.now.n > this.#n) {
      const missed = Math.min(state.now.n - this.#n, this.#tokens.most);
      for (let count = 0; count < missed; count++) {
        this.#tokens.add(state.now.tokens_per_s);
        this.#pairs.add(state.now.pairs_per_s);
      }
      this.#n = state.now.n;
    } else return;
    this.#tokens.draw();
    this.#pairs.draw();
  }
}
