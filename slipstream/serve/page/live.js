// The server's figures once a second: differences of its counts over the last minute, as charts.

import { stats } from "./api.js";
import { Bars, Lines, sample } from "./charts.js";
import { byId, element } from "./dom.js";

const SECONDS = 60;
const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const share = (value) => `${Math.round(100 * value)}%`;
const plain = (value) => (value >= 1000 ? `${short(value / 1000)}k` : String(Number(value.toFixed(value < 1 ? 2 : 1))));

export class Live {
  constructor(onLook) {
    this.looks = []; // answers of the server, oldest first
    this.onLook = onLook;
    this.rate = new Lines("Tokens per second", "tok/s", plain);
    this.acceptance = new Bars("Accepted, by place in the block", "", share);
    this.widths = new Bars("Steps, by width", "", share);
    this.rows = new Lines("Rows per step", "rows", plain);
    this.step = new Lines("Time of a step", "ms", plain);
    const charts = [this.rate, this.acceptance, this.widths, this.rows, this.step];
    byId("figures").append(...charts.map((chart) => chart.box));
    byId("shown").addEventListener("change", () => this.#draw());
  }

  // Until the page is closed; not while nobody sees it.
  async run() {
    for (;;) {
      if (!document.hidden) await this.#look();
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  show(mode) {
    byId("shown").value = mode;
    if (this.looks.length) this.#draw();
  }

  async #look() {
    try {
      const found = await stats(AbortSignal.timeout(5000));
      const last = this.looks.at(-1);
      if (last && (last.model !== found.model || found.time_s < last.time_s)) this.looks = []; // another server
      if (found.time_s !== last?.time_s) this.looks.push(found);
      while (this.looks.length > 2 && found.time_s - this.looks[1].time_s > SECONDS) this.looks.shift();
      this.onLook(found, null);
      this.#draw();
    } catch (error) {
      this.onLook(null, error);
    }
  }

  #draw() {
    const modes = Object.keys(this.looks.at(-1).modes);
    this.#offer(modes);
    this.#drawLines(modes);
    const mode = byId("shown").value;
    this.#drawBars(gained(this.looks[0].modes[mode], this.looks.at(-1).modes[mode]), this.looks.at(-1).modes[mode]);
  }

  #offer(modes) {
    byId("shown-label").hidden = modes.length < 2;
    if (byId("shown").options.length === modes.length) return;
    byId("shown").replaceChildren(...modes.map((mode) => new Option(mode, mode)));
    byId("lines").replaceChildren(...(modes.length > 1 ? modes.map(sample) : []));
  }

  #drawLines(modes) {
    const last = this.looks.at(-1).time_s;
    const pairs = this.looks.slice(1).map((look, i) => [this.looks[i], look]);
    const seconds = pairs.map(([, look]) => look.time_s - last);
    const values = (of) => modes.map((mode) => pairs.map(([a, b]) => of(gained(a.modes[mode], b.modes[mode]), b.time_s - a.time_s)));
    const minute = (of) => modes.map((mode) => of(gained(this.looks[0].modes[mode], this.looks.at(-1).modes[mode])));
    const rows = (gain) => ratio(gain?.rows, gain?.steps);
    const step = (gain) => ratio(gain && 1000 * gain.step_s.sum, gain?.step_s.count);
    const rates = values((gain, time) => (gain ? gain.tokens / time : null));
    for (const [chart, lines, now, unit] of [
      [this.rate, rates, rates.map((line) => line.at(-1)), "tok/s"], // now; the others on average
      [this.rows, values(rows), minute(rows), "rows"],
      [this.step, values(step), minute(step), "ms"],
    ]) {
      chart.drawLines(modes, seconds, lines);
      const said = modes.map((_, i) => (now[i] ? `${short(now[i])} ${unit}` : "idle"));
      chart.say(said[modes.indexOf(byId("shown").value)] ?? "idle", modes.map((mode, i) => `${mode} ${said[i]}`).join(", "));
    }
  }

  #drawBars(gain, now) {
    const accepted = (gain?.verified_at ?? now.verified_at ?? []).map((count, i) => ratio(gain?.accepted_at[i], count));
    const steps = gain?.widths.reduce((sum, count) => sum + count, 0);
    const widths = (gain?.widths ?? now.widths ?? []).map((count) => ratio(gain && count, steps));
    this.acceptance.drawBars(1, accepted, 1);
    this.widths.drawBars(0, widths);
    const rate = ratio(gain?.accepted, gain?.verified);
    const mean = ratio(gain?.verified, steps);
    this.acceptance.say(rate === null ? "–" : `${share(rate)} in all`, told(accepted, 1));
    this.widths.say(mean === null ? "–" : `${mean.toFixed(1)} on average`, told(widths, 0));
    byId("path").replaceChildren(...path(gain, now));
  }
}

const ratio = (part, whole) => (whole ? part / whole : null);
const told = (values, first) => values.map((value, i) => `${i + first}: ${value === null ? "none" : share(value)}`).join(", ") || "no drafts";

// What a mode's counts grew by. Null where one of the looks knows nothing, or the counts began anew.
function gained(before, after) {
  if (before?.rows === undefined || after?.rows === undefined || after.tokens < before.tokens) return null;
  const less = (a, b) => {
    if (Array.isArray(b)) return b.map((value, i) => value - (a[i] ?? 0));
    if (typeof b === "number") return b - (a ?? 0);
    return b && { sum: b.sum - (a?.sum ?? 0), count: b.count - (a?.count ?? 0) };
  };
  const gain = Object.fromEntries(Object.entries(after).filter(([, value]) => typeof value !== "string").map(([key, value]) => [key, less(before[key], value)]));
  return { ...gain, step_s: gain.step_s ?? { sum: 0, count: 0 } };
}

// What a step spends on deciding, building and waiting. What is null was never measured: a CPU has no device beside it.
function path(gain, now) {
  const mean = (name) => (now[name] === null || now[name] === undefined ? null : ratio(gain?.[name]?.sum, gain?.[name]?.count));
  const time = (seconds) => (seconds >= 1e-3 ? `${short(1e3 * seconds)} ms` : `${short(1e6 * seconds)} µs`);
  const rows = [["Whole step", "step_s"], ["Deciding, device idle", "decide_s"], ["Deciding, hidden", "decide_hidden_s"], ["Building, device idle", "build_s"], ["Gap between draft and verify", "gap_s"]];
  const lines = rows.map(([label, name]) => {
    const value = mean(name);
    const measured = now[name] !== null && now[name] !== undefined;
    return [label, value !== null ? time(value) : measured ? "idle" : "not measured"];
  });
  lines.push(["Device busy", now.device_busy == null ? "not measured" : share(now.device_busy)]);
  lines.push(["Running, waiting", `${now.running ?? 0}, ${now.waiting ?? 0}`]);
  return lines.flatMap(([label, value]) => [element("dt", {}, label), element("dd", { class: value === "not measured" || value === "idle" ? "none" : "" }, value)]);
}
