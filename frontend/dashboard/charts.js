// Line charts in SVG: curves over time with gaps, a scale that fits, and a cursor for mouse, finger and arrow keys.

import { draw, duration, h, s } from "./dom.js";

const HEIGHT = 132;
const MARGIN = { left: 44, right: 8, top: 8, bottom: 18 };

export class Chart {
  // `words` writes a value for people; a scale never ends below `least`.
  constructor(title, about, words, least) {
    Object.assign(this, { title, words, least, width: 320, cursor: null, times: [], curves: [], now: 0, span: 1 });
    this.legend = h("div", { class: "legend" });
    this.svg = s("svg", {
      role: "img",
      tabindex: 0,
      height: HEIGHT,
      onpointermove: (event) => this.#point(event),
      onpointerleave: () => this.#move(null),
      onblur: () => this.#move(null),
      onkeydown: (event) => this.#step(event),
    });
    this.element = h("figure", { class: "card chart" },
      h("figcaption", {}, h("h3", {}, title), h("span", { class: "soft" }, about)),
      this.svg, this.legend);
    new ResizeObserver(([entry]) => {
      this.width = Math.max(160, Math.round(entry.contentRect.width));
      this.#redraw();
    }).observe(this.svg);
  }

  // `curves` are {name, colour, values}, with a value or null for each of `times`; `span` is seconds before `now`.
  update(times, curves, now, span) {
    Object.assign(this, { times, curves, now, span });
    this.#redraw();
  }

  #redraw() {
    const shown = this.curves.flatMap(({ values }) =>
      values.filter((value, index) => value !== null && this.times[index] >= this.now - this.span));
    const ticks = scale(Math.max(this.least, ...shown));
    const top = ticks.at(-1);
    const x = (time) => MARGIN.left + (1 - (this.now - time) / this.span) * (this.width - MARGIN.left - MARGIN.right);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.x = x;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.#words());
    const cursor = this.#cursorIndex();
    draw(this.svg,
      ticks.map((tick) => s("g", {},
        s("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        s("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, this.words(tick)))),
      s("text", { class: "tick", x: MARGIN.left, y: HEIGHT - 4 }, `${duration(Math.round(this.span))} ago`),
      s("text", { class: "tick", x: this.width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
      this.curves.map((curve) => this.#curve(curve, x, y)),
      cursor === null ? null : s("line", {
        class: "cursor", x1: x(this.times[cursor]), x2: x(this.times[cursor]), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom,
      }),
      cursor === null ? null : this.curves.filter(({ values }) => values[cursor] !== null).map(({ colour, values }) =>
        s("circle", { cx: x(this.times[cursor]), cy: y(values[cursor]), r: 3, style: { fill: colour } })));
    draw(this.legend,
      this.curves.map(({ name, colour, values }) => {
        const value = cursor === null ? values.at(-1) : values[cursor];
        return h("span", { class: "entry" }, h("i", { style: { background: colour } }), h("span", {}, name),
          h("b", {}, value === null || value === undefined ? "–" : this.words(value)));
      }),
      cursor === null ? null : h("span", { class: "soft when" }, `${Math.round(this.now - this.times[cursor])} s ago`));
  }

  #curve({ colour, values }, x, y) {
    const pieces = [[]];
    values.forEach((value, index) => {
      if (value === null) pieces.push([]);
      else if (this.times[index] >= this.now - this.span) pieces.at(-1).push([x(this.times[index]), y(value)]);
    });
    const path = (points) => points.map(([left, top]) => `${left.toFixed(1)},${top.toFixed(1)}`).join("L");
    const lines = pieces.filter((points) => points.length);
    const floor = HEIGHT - MARGIN.bottom;
    return s("g", {},
      // Several areas over each other would hide what is behind them.
      this.curves.length > 1 ? null : lines.map((points) => s("path", {
        class: "area", style: { fill: colour },
        d: `M${points[0][0]},${floor}L${path(points)}L${points.at(-1)[0]},${floor}Z`,
      })),
      // A point alone is a line of no length, which round ends make a dot.
      lines.map((points) => s("path", { class: "line", style: { stroke: colour }, d: `M${path(points)}${points.length === 1 ? "h0" : ""}` })));
  }

  #words() {
    const now = this.curves.map(({ name, values }) => {
      const value = values.at(-1);
      return `${name} ${value === null || value === undefined ? "not known" : this.words(value)}`;
    });
    return `${this.title}, now: ${now.join(", ") || "nothing yet"}`;
  }

  #cursorIndex() {
    if (this.cursor === null || !this.times.length) return null;
    // Found anew each time: samples move under a cursor that stays.
    const distances = this.times.map((time) => Math.abs(this.x(time) - this.cursor));
    return distances.indexOf(Math.min(...distances));
  }

  #move(position) {
    this.cursor = position;
    this.#redraw();
  }

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    this.#move(((event.clientX - box.left) * this.width) / box.width);
  }

  #step(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.times.length) return;
    event.preventDefault();
    const index = (this.#cursorIndex() ?? this.times.length) + step;
    this.#move(this.x(this.times[Math.min(this.times.length - 1, Math.max(0, index))]));
  }
}

// Round numbers from 0 to above `top`: 0, 20, 40, 60.
export function scale(top) {
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const count = Math.max(1, Math.ceil(top / step - 0.001));
  return Array.from({ length: count + 1 }, (_, index) => index * step);
}
