// Hours of history as small charts that share their time axis and cursor.

import { $, element, setText } from "./dom.js";
import { count, duration, NONE, share } from "./format.js";

const CHARTS = [
  ["late_ratio", "Late steps, all tables", share, "late"],
  ["stall_ms_per_s", "Stall, ms a second", (value) => (value === null ? NONE : `${value.toFixed(value < 10 ? 2 : 0)} ms/s`), "late"],
  ["hit_ratio", "Hits", share, "accent"],
  ["lookups_per_s", "Lookups a second", count, "accent"],
  ["reads_per_s", "Pages read a second", count, "accent"],
  ["read_p99_us", "Read time, 99 % below", duration, "accent"],
];
const HIGH = 96;
const YOUNG_S = 300; // of a daemon that has just started, this much is drawn

export class Series {
  constructor() {
    this.place = $("series");
    this.data = null;
    this.seconds = 10;
    this.span = Number($("span").value);
    this.charts = CHARTS.map(([name, title, say, colour]) => this.#chart(name, title, say, colour));
    $("span").addEventListener("change", () => {
      this.span = Number($("span").value);
      this.draw();
    });
    new ResizeObserver(() => this.#resize()).observe(this.place);
    addEventListener("theme", () => this.#rebuild());
  }

  #chart(name, title, say, colour) {
    const place = element("div", { class: "plot", role: "img", "aria-label": `${title}: nothing seen yet` });
    const value = element("output", { class: "number" }, NONE);
    const frame = element("div", { class: "chart" }, element("p", {}, element("span", {}, title), value), place);
    this.place.append(frame);
    return { name, title, say, colour, place, value, plot: null };
  }

  // The whole history, or what is new of it.
  take(history, whole) {
    this.seconds = history.seconds;
    if (whole || !this.data) {
      this.data = { times: [...history.times], ...pick(history, (column) => [...column]) };
    } else {
      const last = this.data.times.at(-1) ?? 0;
      history.times.forEach((time, at) => {
        if (time <= last + history.seconds / 2) return;
        this.data.times.push(time);
        for (const chart of this.charts) this.data[chart.name].push(history[chart.name][at]);
      });
      const extra = this.data.times.length - 2160;
      if (extra > 0) for (const column of Object.values(this.data)) column.splice(0, extra);
    }
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const end = this.data.times.at(-1) ?? Date.now() / 1000;
    const from = this.data.times.findIndex((time) => time >= end - this.span);
    const times = this.data.times.slice(Math.max(from, 0));
    const begin = Math.min(times[0] ?? end, end - YOUNG_S);
    for (const chart of this.charts) {
      const values = this.data[chart.name].slice(Math.max(from, 0));
      chart.range = [Math.max(end - this.span, begin), end];
      chart.plot ??= this.#plot(chart);
      chart.plot.setData([times, values]);
      const known = values.filter((value) => value !== null);
      const last = values.at(-1) ?? null;
      chart.last = last;
      setText(chart.value, chart.say(last));
      const most = known.length ? `at most ${chart.say(Math.max(...known))}` : "nothing seen";
      chart.place.setAttribute("aria-label", `${chart.title}: now ${chart.say(last)}, ${most} in the span shown`);
    }
  }

  #plot(chart) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(this.#width(chart), 120), height: HIGH, legend: { show: false },
      cursor: { sync: { key: "time" }, points: { size: 5 }, drag: { x: false, y: false }, y: false },
      scales: { x: { range: () => chart.range }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] } },
      axes: [
        { ...axis, size: 22, space: 64, values: (_, ticks) => ticks.map(hours) },
        { ...axis, size: 60, space: 28, values: (_, ticks) => ticks.map((tick) => chart.say(tick)) },
      ],
      series: [{}, {
        stroke: colour(chart.colour), width: 1.5, points: { show: false }, spanGaps: false,
        fill: `${colour(chart.colour)}22`,
      }],
      hooks: { setCursor: [(plot) => this.#point(chart, plot)] },
    };
    return new uPlot(options, [[], []], chart.place);
  }

  #point(chart, plot) {
    const at = plot.cursor.idx;
    const seen = at === null || at === undefined ? null : plot.data[1][at];
    const time = at === null || at === undefined ? "" : `${hours(plot.data[0][at])}  `;
    setText(chart.value, time ? time + chart.say(seen ?? null) : chart.say(chart.last ?? null));
  }

  #width(chart) {
    return chart.place.clientWidth;
  }

  #resize() {
    for (const chart of this.charts) {
      const width = this.#width(chart);
      if (chart.plot && width > 0 && width !== chart.plot.width) chart.plot.setSize({ width, height: HIGH });
    }
  }

  #rebuild() {
    for (const chart of this.charts) {
      chart.plot?.destroy();
      chart.plot = null;
    }
    this.draw();
  }
}

function pick(history, copy) {
  return Object.fromEntries(CHARTS.map(([name]) => [name, copy(history[name])]));
}

function hours(time) {
  const at = new Date(time * 1000);
  return [at.getHours(), at.getMinutes()].map((value) => String(value).padStart(2, "0")).join(":");
}
