// Small charts, drawn by uPlot in the colours of the page. Text beside each says the same.

import { element } from "./dom.js";

const DASHES = [[], [6, 4], [1, 4], [9, 3, 2, 3], [3, 3]];
const COLOURS = ["--accent", "--ink", "--pruned", "--quiet", "--problem"];
const drawn = new Set();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const font = () => `11px ${colour("--sans")}`;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((chart) => chart.draw()));

class Chart {
  constructor(title, unit, format) {
    this.format = format;
    this.value = element("output", {}, "–");
    this.place = element("div", { class: "chart", role: "img", ariaLabel: `${title}: nothing yet` });
    const caption = element("figcaption", {}, element("span", {}, title), this.value);
    this.box = element("figure", {}, caption, this.place);
    Object.assign(this, { title, unit, plot: null, data: null });
    new ResizeObserver(() => this.resize()).observe(this.place);
    drawn.add(this);
  }

  // label: what is said beside the title; told: the same for who does not see the chart.
  say(label, told) {
    this.value.textContent = label;
    this.place.ariaLabel = `${this.title}: ${told}`;
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.place;
    if (this.plot && width) this.plot.setSize({ width, height });
  }

  draw() {
    this.plot?.redraw(false);
  }

  show(data, options) {
    this.plot?.destroy();
    const { clientWidth: width, clientHeight: height } = this.place;
    const still = { cursor: { show: false }, legend: { show: false }, padding: [6, 16, 0, 0] };
    this.plot = new uPlot({ width: width || 300, height: height || 90, ...still, ...options }, data, this.place);
  }

  axes(x) {
    const grid = { stroke: () => colour("--line"), width: 1 };
    const shared = { stroke: () => colour("--quiet"), font: font(), ticks: { show: false } };
    const values = (_, ticks) => ticks.map((tick) => this.format(tick));
    return [{ ...shared, grid: { show: false }, size: 22, gap: 4, ...x }, { ...shared, grid, size: 44, gap: 4, space: 18, values }];
  }
}

// Values over the last minute, a line for each mode.
export class Lines extends Chart {
  drawLines(modes, seconds, rows) {
    const data = [seconds, ...rows];
    if (this.plot && this.modes === modes.join()) return this.plot.setData(data);
    this.modes = modes.join();
    const ago = (_, ticks) => ticks.map((tick) => (tick ? `${-tick} s` : "now"));
    this.show(data, {
      scales: { x: { time: false, range: [-60, 0] }, y: { range: (_, low, high) => [0, high > 0 ? 1.1 * high : 1] } },
      axes: this.axes({ values: ago, splits: [-60, -30, 0] }),
      series: [{}, ...modes.map((_, i) => ({ stroke: () => colour(COLOURS[i]), dash: DASHES[i], width: 1.75, points: { show: false } }))],
    });
  }
}

// One value for each place 0 or 1, 2, ...
export class Bars extends Chart {
  drawBars(first, values, most) {
    const places = values.map((_, i) => i + first);
    const data = [places, values];
    if (this.plot && this.count === values.length) return this.plot.setData(data);
    this.count = values.length;
    this.show(data, {
      scales: { x: { time: false, range: [first - 0.6, first + values.length - 0.4] }, y: { range: (_, low, high) => [0, most ?? (high || 1)] } },
      axes: this.axes({ splits: () => places, values: (_, ticks) => ticks.map(String) }),
      series: [{}, { stroke: () => colour("--accent"), fill: () => colour("--accent-tint"), width: 1.5, paths: uPlot.paths.bars({ size: [0.62, 40] }), points: { show: false } }],
    });
  }
}

// What the line of a mode looks like.
export function sample(mode, i) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS(svg.namespaceURI, "line");
  for (const [key, value] of Object.entries({ x1: 0, y1: "50%", x2: "100%", y2: "50%", "stroke-width": 2, "stroke-dasharray": DASHES[i].join(" ") })) {
    line.setAttribute(key, value);
  }
  line.style.stroke = `var(${COLOURS[i]})`;
  svg.append(line);
  return element("span", {}, svg, mode);
}
