// The cache split of one client: ways in force and wanted, measured beside predicted, and how the
// controller's wish has moved.

import { $, element, Grid, set, setText, svg } from "./dom.js";
import { bytes, clock, duration, NONE, share } from "./format.js";

const WAYS = 32;
const TALL = 12;
const WIDE = 1000;

const ms = (value) => (value === null ? NONE : duration(value * 1000));

export class Splits {
  constructor() {
    this.place = $("splits");
    this.about = element("p", { class: "muted", id: "split-about" });
    const table = element("div", { class: "scroll", role: "group", "aria-label": "Split by table", tabindex: "0" });
    this.grid = new Grid(table, "Tables of this client: ways and predictions", columns(),
      "No engine is attached, so no cache is split.");
    this.moves = element("div", { id: "moves" });
    this.place.replaceChildren(this.about, table, this.moves);
  }

  show(client, controller, events) {
    const rows = (client?.tables ?? []).map((table) => ({ ...table, key: table.name }));
    this.grid.show(rows);
    setText(this.about, client ? about(client, controller) : controller?.problems.join("; ") ?? "");
    this.about.hidden = !this.about.textContent;
    this.#moves(client, events);
  }

  // One strip a table: darker where the controller wants more ways for it.
  #moves(client, events) {
    const caches = (client?.caches ?? []).map((cache) => ({ cache, steps: steps(client, cache, events) }));
    this.moves.hidden = !caches.some(({ steps: found }) => found.length);
    if (this.moves.hidden) return;
    this.moves.replaceChildren(element("h3", {}, "Wanted ways over time"), ...caches.map(strips));
  }
}

function columns() {
  const two = (measured, predicted) => (cell, row) => {
    const [now, then] = cell.firstChild.children;
    setText(now, measured(row));
    setText(then, predicted(row));
  };
  const pair = () => element("span", { class: "pair" }, element("span"), element("small"));
  return [
    { id: "name", title: "Table", text: (row) => row.name, hint: (row) => row.name, sort: (row) => row.name },
    { id: "window", title: "Window", number: true, narrow: "mid", text: (row) => ms(row.window_ms), sort: (row) => row.window_ms },
    {
      id: "ways", title: "Ways", sort: (row) => row.ways, about: "Of 32: in force, and what the controller wants below it.",
      make: () => svg(
        "svg", { class: "ways-picture", viewBox: "0 0 32 12", preserveAspectRatio: "none", role: "img" },
        svg("rect", { class: "all", width: 32, height: 12 }), svg("rect", { class: "ways-now", y: 1, height: 5 }),
        svg("rect", { class: "ways-advised", y: 7, height: 4 }),
      ),
      draw: (cell, row) => {
        const [, force, advised] = cell.firstChild.children;
        set(force, "width", row.ways ?? 0);
        set(advised, "width", row.advised_ways ?? 0);
        set(cell.firstChild, "aria-label", `${row.ways ?? NONE} ways in force, ${row.advised_ways ?? NONE} wanted`);
      },
    },
    {
      id: "force", title: "In force / wanted", number: true, sort: (row) => row.advised_ways,
      text: (row) => `${row.ways ?? NONE} / ${row.advised_ways ?? NONE}`, warn: (row) => row.ways !== row.advised_ways,
    },
    {
      id: "hits", title: "Hits", number: true, narrow: "mid", about: "Measured; predicted below.", make: pair,
      draw: two((row) => share(row.hit_ratio), (row) => share(row.predicted_hit_ratio)),
    },
    {
      id: "pages", title: "Pages/step", number: true, narrow: "wide", about: "Measured; predicted below.", make: pair,
      draw: two((row) => row.pages.toFixed(1), (row) => (row.predicted_pages === null ? NONE : row.predicted_pages.toFixed(1))),
    },
    {
      id: "read", title: "Read", number: true, narrow: "mid", about: "Mean, measured; predicted below.", make: pair,
      draw: two((row) => ms(row.read_ms), (row) => ms(row.predicted_read_ms)),
    },
    {
      id: "stall", title: "Stall/step", number: true, narrow: "mid", about: "Measured; predicted below.", make: pair,
      draw: two((row) => ms(row.stall_ms), (row) => ms(row.predicted_stall_ms)),
    },
  ];
}

function about(client, controller) {
  const said = [controller.frozen ? `frozen: ${controller.frozen}` : `controller: ${controller.mode}`];
  if (client.problem) said.push(client.problem);
  if (client.caches.length && !client.caches.some((cache) => cache.follows)) said.push("advice only: the engine does not follow");
  for (const cache of client.caches) {
    const room = `${bytes(cache.sets * WAYS * cache.row_bytes)} of rows of ${cache.row_bytes} B`;
    said.push([room, cache.decision, cache.size].filter(Boolean).join(", "));
  }
  return said.join("; ");
}

// What was decided for this client's cache, oldest first: [{time, ways}].
function steps(client, cache, events) {
  const subject = `${client.engine} rank ${client.rank}`;
  return events
    .filter((event) => event.subject === subject && event.details.ways?.length === cache.ways.length)
    .map((event) => ({ time: Date.parse(event.time), ways: event.details.ways }))
    .reverse();
}

function strips({ cache, steps: found }) {
  if (!found.length) return "";
  const end = Date.now();
  const begin = Math.min(found[0].time, end - 60_000);
  const x = (time) => ((time - begin) / Math.max(end - begin, 1)) * WIDE;
  const lines = cache.tables.map((name, at) => {
    const parts = found.map((step, number) => {
      const until = found[number + 1]?.time ?? end;
      const made = svg("rect", { class: "move", x: x(step.time), y: 0, width: Math.max(x(until) - x(step.time), 2), height: TALL });
      made.style.opacity = 0.08 + 0.92 * (step.ways[at] / WAYS);
      made.append(svg("title", {}, `${clock(new Date(step.time).toISOString())}: ${step.ways[at]} ways`));
      return made;
    });
    const said = `${name}: ${found.map((step) => step.ways[at]).join(", ")} ways`;
    return element(
      "div", { class: "strip" }, element("span", { title: name }, name),
      svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", role: "img", "aria-label": said }, ...parts),
      element("span", { class: "number" }, String(found.at(-1).ways[at])),
    );
  });
  const from = clock(new Date(begin).toISOString());
  return element("div", { class: "strips" }, ...lines, element("p", { class: "axis muted" }, element("span", {}, from), element("span", {}, "now")));
}
