// Devices, clients, jobs, events and decisions: plain tables.

import { $, element, Grid, setText } from "./dom.js";
import { bytes, clock, count, duration, NONE, share, span } from "./format.js";

const meter = (about) => element("meter", { min: 0, max: 1, "aria-label": about });

export function devices() {
  return new Grid($("device-list"), "Devices", [
    { id: "path", title: "Device", text: (row) => row.path, hint: (row) => row.uuid || row.path, sort: (row) => row.path },
    {
      id: "space", title: "Used", number: true, sort: (row) => used(row),
      make: () => element("span", { class: "metered" }, meter("used"), element("span")),
      draw: (cell, row) => {
        const [picture, text] = cell.firstChild.children;
        picture.value = used(row);
        setText(text, row.size_bytes ? `${bytes(row.free_bytes)} of ${bytes(row.size_bytes)} free` : NONE);
      },
    },
    { id: "images", title: "Images", number: true, narrow: "mid", text: (row) => count(row.images), sort: (row) => row.images },
    { id: "reads", title: "Reads/s", number: true, text: (row) => count(row.reads_per_s), sort: (row) => row.reads_per_s },
    { id: "queue", title: "In flight", number: true, narrow: "mid", text: (row) => count(row.in_flight), sort: (row) => row.in_flight },
    { id: "p50", title: "Read 50 %", number: true, narrow: "mid", text: (row) => below(row.read_p50_us), sort: (row) => row.read_p50_us },
    { id: "p99", title: "Read 99 %", number: true, text: (row) => below(row.read_p99_us), sort: (row) => row.read_p99_us },
    {
      id: "errors", title: "Errors", number: true, narrow: "mid", text: (row) => count(row.errors),
      warn: (row) => row.errors > 0, sort: (row) => row.errors,
    },
    {
      id: "note", title: "Remarks", narrow: "mid", text: (row) => row.absent || row.note || (row.direct ? "direct" : "through the page cache"),
      hint: (row) => row.absent || row.note, warn: (row) => Boolean(row.absent),
    },
  ], "The daemon has no devices.");
}

const used = (row) => (row.size_bytes ? 1 - row.free_bytes / row.size_bytes : 0);
const below = (us) => (us === null ? NONE : `< ${duration(us)}`);

export function clients() {
  return new Grid($("client-list"), "Attached engine ranks", [
    { id: "engine", title: "Engine", text: (row) => row.engine, hint: (row) => row.client, sort: (row) => row.engine },
    { id: "rank", title: "Rank", number: true, text: (row) => `${row.rank}/${row.world}`, sort: (row) => row.rank },
    { id: "pid", title: "Pid", number: true, narrow: "mid", text: (row) => String(row.pid) },
    { id: "tables", title: "Tables", number: true, narrow: "mid", text: (row) => count(row.tables) },
    { id: "steps", title: "Steps/s", number: true, text: (row) => count(row.steps_per_s), sort: (row) => row.steps_per_s },
    { id: "late", title: "Late", number: true, text: (row) => share(row.late_ratio), warn: (row) => row.late_ratio > 0, sort: (row) => row.late_ratio },
    { id: "stall", title: "Stall/step", number: true, narrow: "mid", text: (row) => duration(row.stall_us), sort: (row) => row.stall_us },
    { id: "hits", title: "Hits", number: true, narrow: "mid", text: (row) => share(row.hit_ratio), sort: (row) => row.hit_ratio },
    {
      id: "served", title: "Served by", text: (row) => (row.guardian ? `itself (${row.guardian} of ${row.tables})` : "daemon"),
      warn: (row) => row.guardian > 0,
    },
    { id: "since", title: "Since", narrow: "wide", text: (row) => clock(row.attached_at) },
  ], "No engine is attached. In an engine's environment: tierd run -- COMMAND");
}

export function jobs() {
  return new Grid($("job-list"), "Jobs, newest first", [
    { id: "kind", title: "Job", text: (row) => row.kind, hint: (row) => row.job },
    { id: "about", title: "About", text: (row) => row.subject, hint: (row) => row.subject },
    { id: "state", title: "State", text: (row) => row.state, warn: (row) => row.state === "failed" },
    {
      id: "done", title: "Done", number: true,
      make: () => element("span", { class: "metered" }, meter("done"), element("span")),
      draw: (cell, row) => {
        const [picture, text] = cell.firstChild.children;
        const part = row.state === "done" ? 1 : done(row.progress);
        picture.hidden = part === null;
        picture.value = part ?? 0;
        setText(text, part === null ? bytes(row.progress.done_bytes) : share(part));
      },
    },
    { id: "left", title: "Left", number: true, narrow: "mid", text: (row) => (row.state === "running" ? span(row.progress.left_s) : NONE) },
    { id: "when", title: "Begun", narrow: "mid", text: (row) => clock(row.started_at ?? row.created_at) },
    { id: "error", title: "Remarks", narrow: "wide", text: (row) => row.error || row.progress.doing || "", hint: (row) => row.error },
  ], "No jobs. tierd stage and tierd verify begin some.");
}

const done = (progress) => (progress.total_bytes ? progress.done_bytes / progress.total_bytes : null);

export function events() {
  return new Grid($("event-list"), "Events, newest first", [
    { id: "when", title: "Time", text: (row) => clock(row.time) },
    { id: "kind", title: "Kind", text: (row) => row.kind, warn: (row) => ["failed", "damaged", "incomplete"].includes(row.kind) },
    { id: "about", title: "About", text: (row) => row.subject, hint: (row) => row.subject },
    { id: "details", title: "Details", narrow: "mid", text: (row) => details(row.details), hint: (row) => details(row.details) },
  ], "Nothing has happened yet.");
}

function details(found) {
  return Object.entries(found)
    .filter(([, value]) => value !== "" && value !== null && !(Array.isArray(value) && !value.length))
    .map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(" ") : value}`)
    .join(", ");
}

export function decisions() {
  return new Grid($("decisions"), "Decisions of the controller, newest first", [
    { id: "when", title: "Time", text: (row) => clock(row.time) },
    { id: "kind", title: "Decision", text: (row) => row.action },
    { id: "about", title: "For", narrow: "mid", text: (row) => row.subject, hint: (row) => row.subject },
    { id: "details", title: "Because", text: (row) => row.reason, hint: (row) => row.reason },
    { id: "ways", title: "Ways", narrow: "wide", text: (row) => row.ways.join(" "), hint: (row) => row.ways.join(" ") },
  ], "Nothing decided yet.");
}
