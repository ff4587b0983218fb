// Miss curves of one client's tables, each with the point where its cache is now.

import { $, element, set, setText, svg, toggle } from "./dom.js";
import { count, names, NONE, share } from "./format.js";

const WIDE = 200;
const HIGH = 84;

export class Curves {
  constructor() {
    this.place = $("multiples");
    this.empty = element("p", { class: "muted empty" }, "No lookups have been sampled yet.");
    this.shown = new Map();
  }

  // curves: of GET /v1/curves; client: of GET /v1/controller, or undefined.
  show(curves, client) {
    const rows = cacheRows(client);
    const wanted = [];
    for (const table of client?.tables ?? []) {
      const own = curves.filter((curve) => curve.client === client.client && names(curve.table).table === table.name);
      if (own.length) wanted.push({ table, own, rows: rows.get(table.name) });
    }
    const keys = new Set(wanted.map((one) => one.table.name));
    for (const [key, figure] of this.shown) {
      if (!keys.has(key)) {
        figure.remove();
        this.shown.delete(key);
      }
    }
    for (const one of wanted) {
      let figure = this.shown.get(one.table.name);
      if (!figure) {
        figure = picture();
        this.shown.set(one.table.name, figure);
        this.place.append(figure);
      }
      draw(figure, one);
    }
    if (wanted.length) this.empty.remove();
    else this.place.append(this.empty);
  }
}

// How many rows of each table its cache holds, by the ways in force.
function cacheRows(client) {
  const found = new Map();
  for (const cache of client?.caches ?? []) {
    cache.tables.forEach((name, at) => found.set(name, cache.ways[at] * cache.sets));
  }
  return found;
}

function picture() {
  const path = (name) => svg("path", { class: name });
  return element(
    "figure", {},
    element("figcaption", {}, element("b"), element("span", { class: "muted" })),
    svg(
      "svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" },
      path("grid"), path("band"), path("decode"), path("prefill"), path("here"), svg("title"),
    ),
    element("p", { class: "axis muted", "aria-hidden": "true" }, element("span"), element("span")),
  );
}

function draw(figure, { table, own, rows }) {
  const [caption, drawing, axis] = figure.children;
  const [grid, band, decode, prefill, here, title] = drawing.children;
  const top = Math.max(16, 2 * (rows ?? 0), ...own.map(end));
  const x = (size) => Math.min(Math.log1p(Math.max(size, 0)) / Math.log1p(top), 1) * WIDE;
  const y = (miss) => HIGH - Math.min(Math.max(miss, 0), 1) * HIGH;
  const line = (curve, value) =>
    curve.rows.map((size, at) => `${at ? "L" : "M"}${x(size).toFixed(1)} ${y(value(at)).toFixed(1)}`).join("");
  const of = (phase) => own.find((curve) => curve.phase === phase);
  set(grid, "d", [0.25, 0.5, 0.75].map((part) => `M0 ${HIGH * part}H${WIDE}`).join(""));
  const [now, long] = [of("decode"), of("prefill")];
  set(decode, "d", now ? line(now, (at) => now.miss[at]) : "M0 0");
  set(prefill, "d", long ? line(long, (at) => long.miss[at]) : "M0 0");
  set(band, "d", now ? around(now, x, y) : "M0 0");
  const measured = table.hit_ratio === null ? null : 1 - table.hit_ratio;
  const known = measured !== null && rows !== undefined;
  set(here, "d", known ? `M${x(rows).toFixed(1)} ${y(measured).toFixed(1)}h0.01` : "M0 0");
  toggle(here, "none", !known);
  setText(caption.children[0], table.name);
  set(caption.children[0], "title", table.name);
  setText(caption.children[1], known ? `${share(measured)} miss at ${count(rows)} rows` : `${count(rows)} rows`);
  setText(axis.children[0], "0 rows");
  setText(axis.children[1], count(top));
  const predicted = table.predicted_hit_ratio === null ? NONE : share(1 - table.predicted_hit_ratio);
  const said = `${table.name}: ${measured === null ? "nothing measured" : `${share(measured)} of lookups miss`}, ${predicted} predicted`;
  set(drawing, "aria-label", said);
  setText(title, said);
}

// Where a curve has come down: what follows is a flat line.
function end(curve) {
  const last = curve.miss.at(-1);
  const at = curve.miss.findLastIndex((miss) => miss > last + 0.003);
  return curve.rows[Math.min(at + 1, curve.rows.length - 1)];
}

// One standard error on both sides.
function around(curve, x, y) {
  const upper = curve.rows.map((size, at) => `${x(size).toFixed(1)} ${y(curve.miss[at] + curve.error[at]).toFixed(1)}`);
  const lower = curve.rows.map((size, at) => `${x(size).toFixed(1)} ${y(curve.miss[at] - curve.error[at]).toFixed(1)}`);
  return `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
}
