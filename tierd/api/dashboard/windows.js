// The paper's figure 1, live: a table's window beside the distribution of its read times.

import { $, element, Grid, set, setText, svg, toggle } from "./dom.js";
import { count, duration, names, NONE, share } from "./format.js";

const FIRST_US = 8; // bound of bucket 0; each further bound is sqrt(2) times the last
const WIDE = 1000;
const HIGH = 20;

const bound = (bucket) => FIRST_US * 2 ** (bucket / 2);

export class Windows {
  constructor() {
    this.low = 8;
    this.high = 8192;
    this.ticks = element("div", { class: "ticks", "aria-hidden": "true" });
    this.grid = new Grid($("lanes"), "Tables by layer: window, read times, lateness", this.#columns(),
      "No images are served yet. On the node: tierd stage CHECKPOINT --device DEVICE");
  }

  #columns() {
    const late = (row) => row.late_ratio > 0;
    return [
      {
        id: "layer", title: "Layer", number: true, narrow: "mid", sort: (row) => row.layer,
        text: (row) => String(row.layer),
      },
      {
        id: "name", title: "Table", sort: (row) => row.name, hint: (row) => row.name,
        make: () => element("span", { class: "name" }, element("b"), element("small")),
        draw: (cell, row) => {
          const { model, table } = names(row.name);
          const [name, of] = cell.firstChild.children;
          setText(name, table);
          setText(of, model);
        },
      },
      {
        id: "lane", title: "", head: (cell) => {
          cell.append(element("span", { class: "unseen" }, "Window against read times"), this.ticks);
        },
        make: lane, draw: (cell, row) => this.#draw(cell.firstChild, row),
      },
      {
        id: "window", title: "Window", number: true, narrow: "mid", sort: (row) => row.window_us,
        about: "From step start until the layer reads. (a) is assumed: not measured, not set.",
        text: (row) => duration(row.window_us) + (row.window_source === "assumed" ? " (a)" : ""),
      },
      {
        id: "p99", title: "Read 99 %", number: true, narrow: "mid", sort: (row) => row.read_p99_us,
        about: "99 % of the last minute's reads took less.", text: (row) => duration(row.read_p99_us),
      },
      {
        id: "slack", title: "Slack", number: true, sort: (row) => row.slack_us,
        about: "Window less the time below which 99 % of reads are; unknown while the window is assumed.",
        text: (row) => duration(row.slack_us), warn: (row) => row.slack_us !== null && row.slack_us < 0,
      },
      {
        id: "late", title: "Late", number: true, sort: (row) => row.late_ratio, warn: late,
        about: "Share of the last minute's steps that waited more than 20 us.",
        text: (row) => share(row.late_ratio),
      },
      {
        id: "stall", title: "Stall/step", number: true, narrow: "mid", sort: (row) => row.stall_us,
        about: "Mean wait of a step for rows of this table.", text: (row) => duration(row.stall_us),
      },
      {
        id: "hits", title: "Hits", number: true, narrow: "wide", sort: (row) => row.hit_ratio,
        text: (row) => share(row.hit_ratio),
      },
      {
        id: "steps", title: "Steps/s", number: true, narrow: "wide", sort: (row) => row.steps_per_s,
        text: (row) => count(row.steps_per_s),
      },
      {
        id: "lookups", title: "Lookups/s", number: true, narrow: "wide",
        sort: (row) => row.lookups_per_s, text: (row) => count(row.lookups_per_s),
      },
      {
        id: "misses", title: "Misses/s", number: true, narrow: "wide",
        sort: (row) => row.misses_per_s, text: (row) => count(row.misses_per_s),
      },
      {
        id: "failed", title: "Failed", number: true, narrow: "wide",
        about: "Requests that failed and rows whose tag was wrong, since the daemon's start.",
        sort: (row) => row.failed + row.tag_errors, warn: (row) => row.failed + row.tag_errors > 0,
        text: (row) => count(row.failed + row.tag_errors),
      },
    ];
  }

  show(tables) {
    this.#scale(tables);
    this.grid.show(tables.map((table) => ({ ...table, key: table.name })));
  }

  // One axis for all, in powers of ten, that moves only when something would not fit.
  #scale(tables) {
    let low = 1e2;
    let high = 1e3;
    for (const table of tables) {
      const last = table.read_first + table.read_times.length - 1;
      if (table.read_times.length) {
        low = Math.min(low, table.read_first ? bound(table.read_first - 1) : 1);
        high = Math.max(high, bound(last));
      }
      low = Math.min(low, table.window_us / 2);
      high = Math.max(high, table.window_us * 1.2);
    }
    low = Math.max(1, 10 ** Math.floor(Math.log10(Math.max(low, 1))));
    high = 10 ** Math.ceil(Math.log10(high));
    if (low === this.low && high === this.high && this.ticks.childElementCount) return;
    [this.low, this.high] = [low, high];
    const decades = Math.round(Math.log10(high / low));
    this.decades = decades;
    this.ticks.replaceChildren();
    for (let at = 0; at <= decades; at += 1) {
      const tick = element("span", {}, duration(low * 10 ** at));
      tick.style.left = `${(at / decades) * 100}%`;
      if (at === 0) tick.className = "first";
      if (at === decades) tick.className = "last";
      if (decades > 3 && at % 2 === 1) tick.classList.add("odd");
      this.ticks.append(tick);
    }
  }

  #x(us) {
    const part = Math.log(us / this.low) / Math.log(this.high / this.low);
    return Math.round(Math.min(Math.max(part, 0), 1) * WIDE * 10) / 10;
  }

  #draw(picture, row) {
    const [grid, band, times, over, middle, edge, mark] = picture.children;
    const end = this.#x(row.window_us);
    const known = row.window_source !== "assumed";
    let lines = "";
    for (let at = 1; at < this.decades; at += 1) lines += `M${(at / this.decades) * WIDE} 0V${HIGH}`;
    set(grid, "d", lines);
    set(band, "width", end);
    toggle(picture, "assumed", !known);
    set(edge, "d", `M${end} 0V${HIGH}`);
    const most = Math.max(1, ...row.read_times);
    let below = "";
    let beyond = "";
    row.read_times.forEach((number, at) => {
      if (!number) return;
      const bucket = row.read_first + at;
      const left = bucket ? this.#x(bound(bucket - 1)) : 0;
      const right = this.#x(bound(bucket));
      // Square roots: a tail of one in a thousand has to be seen as well.
      const top = HIGH - Math.max(1.5, Math.sqrt(number / most) * (HIGH - 3));
      const bar = `M${left} ${HIGH}V${top.toFixed(1)}H${right}V${HIGH}Z`;
      if (known && bound(bucket) > row.window_us * Math.SQRT2) beyond += bar;
      else below += bar;
    });
    set(times, "d", below || "M0 0");
    set(over, "d", beyond || "M0 0");
    set(middle, "d", row.read_p50_us ? `M${this.#x(row.read_p50_us)} 4V${HIGH}` : "M0 0");
    set(mark, "d", row.read_p99_us ? `M${this.#x(row.read_p99_us)} 0V${HIGH}` : "M0 0");
    const reads = row.reads
      ? `half of ${count(row.reads)} reads below ${duration(row.read_p50_us)}, 99 % below ${duration(row.read_p99_us)}`
      : "no reads in the last minute";
    const said = `window ${duration(row.window_us)}${known ? "" : " (assumed)"}; ${reads}`;
    set(picture, "aria-label", said);
    setText(picture.lastChild, said);
  }
}

function lane() {
  const path = (name) => svg("path", { class: name });
  return svg(
    "svg", { class: "lane-picture", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" },
    path("grid"), svg("rect", { class: "band", x: 0, y: 0, height: HIGH }), path("times"),
    path("over"), path("middle"), path("edge"), path("mark"), svg("title"),
  );
}

// The headline: what is worst, over all tables.
export function tiles(now) {
  const worst = (value) => now.tables.reduce((found, table) => {
    const one = value(table);
    return one !== null && (found === null || one > found.value) ? { value: one, table } : found;
  }, null);
  const sum = (value) => now.tables.reduce((total, table) => total + value(table), 0);
  const late = worst((table) => table.late_ratio);
  const stall = worst((table) => table.stall_us);
  const slack = worst((table) => (table.slack_us === null ? null : -table.slack_us));
  const lookups = sum((table) => table.lookups_per_s);
  const misses = sum((table) => table.misses_per_s);
  const of = (found) => (found ? names(found.table.name).table : "");
  return [
    ["Late steps", late ? share(late.value) : NONE, late?.value ? of(late) : "no table", late?.value > 0],
    ["Stall a step", stall ? duration(stall.value) : NONE, stall?.value ? of(stall) : "no table", false],
    ["Least slack", slack ? duration(-slack.value) : NONE, slack ? of(slack) : "windows assumed",
      slack !== null && slack.value > 0],
    ["Hits", lookups ? share(1 - misses / lookups) : NONE, `${count(lookups)} lookups/s`, false],
    ["Steps/s", count(Math.max(0, ...now.clients.map((client) => client.steps_per_s))), "of the busiest client",
      false],
    ["Pages read/s", count(now.pumps.reduce((total, pump) => total + pump.reads_per_s, 0)),
      `${now.pumps.reduce((total, pump) => total + pump.in_flight, 0)} in flight`, false],
    ["Clients", String(now.clients.length), `${count(now.images)} images`, false],
  ];
}
