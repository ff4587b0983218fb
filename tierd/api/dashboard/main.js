// Puts the page together: one stream for what changes every second, three questions every ten
// seconds for what changes slowly, and a clock that says when the daemon has gone silent.

import { Curves } from "./curves.js";
import { $, element, set, setText, toggle } from "./dom.js";
import { bytes, clock, span } from "./format.js";
import * as lists from "./lists.js";
import { Series } from "./series.js";
import { enter, enterByAddress, get, Refused } from "./session.js";
import { Splits } from "./splits.js";
import { Stream } from "./stream.js";
import { tiles, Windows } from "./windows.js";

const STALE_MS = 3000; // the daemon speaks every second
const SLOW_MS = 10_000;
const EVENTS_MAX = 200;
const SLEPT_MS = 5000; // a tick that is this late: the browser was asleep

const grids = {
  devices: lists.devices(), clients: lists.clients(), jobs: lists.jobs(), events: lists.events(),
  decisions: lists.decisions(),
};
const windows = new Windows();
const series = new Series();
const splits = new Splits();
const curves = new Curves();

let now = null; // the last overview
let lost = ""; // why there is no connection
let since = ""; // when the daemon was last heard
let events = [];
let controller = null;
let known = null; // curves
let boot = "";
let ticked = Date.now();
let asked = 0;
let fetching = false; // events

const stream = new Stream("/v1/overview", {
  heard: (overview) => {
    lost = "";
    now = overview;
    if (overview.boot_id !== boot) anew(overview.boot_id);
    if (overview.last_event > (events[0]?.id ?? 0)) fetchEvents();
    show();
  },
  lost: (why) => {
    lost = why;
    judge();
  },
  refused: askForToken,
});

// Another daemon, or the first: nothing of the last one's is kept.
function anew(id) {
  boot = id;
  events = [];
  asked = 0;
  fetchSlow(true);
}

function show() {
  setText($("name"), now.name);
  document.title = `${now.name}: tierd`;
  const about = `tierd ${now.version}, pid ${now.pid}, up ${span(now.uptime_s)}`;
  setText($("about"), now.doctor.verdict === "ok" || now.doctor.verdict === "unknown" ? about
    : `${about}, doctor: ${now.doctor.problems} problems, ${now.doctor.warnings} warnings`);
  showTiles();
  showProblems();
  windows.show(now.tables);
  grids.devices.show(now.devices.map((row) => ({ ...row, key: row.uuid || row.path })));
  grids.clients.show(now.clients.map((row) => ({ ...row, key: row.client })));
  grids.jobs.show(now.jobs.map((row) => ({ ...row, key: row.job })));
  setText($("pumps"), now.pumps.map((pump, at) =>
    `pump ${at}: ${pump.transport}, ${(pump.cpu * 100).toFixed(0)} % of a core, ${pump.in_flight} in flight`).join("; "));
  const { pool_bytes: pool, free_bytes: free, leases } = now.kv;
  setText($("kv"), pool ? `KV pool: ${bytes(pool - free)} of ${bytes(pool)} leased, ${leases} leases` : "");
  judge();
}

function showTiles() {
  const place = $("tiles");
  tiles(now).forEach(([title, value, about, warn], at) => {
    let tile = place.children[at];
    if (!tile) {
      tile = element("div", {}, element("dt"), element("dd"), element("dd", { class: "muted" }));
      place.append(tile);
    }
    [title, value, about].forEach((text, part) => setText(tile.children[part], text));
    set(tile.children[2], "title", about);
    toggle(tile.children[1], "warn", Boolean(warn));
  });
}

function showProblems() {
  const found = [...now.problems];
  const place = $("problems");
  place.hidden = found.length === 0;
  if (found.join("\n") === place.dataset.shown) return;
  place.dataset.shown = found.join("\n");
  place.replaceChildren(...found.map((text) => element("li", {}, text)));
}

// What the head says of the daemon: silence is told apart from a part of it that stands still.
function judge() {
  const silent = stream.silence > STALE_MS;
  let [state, text, why] = ["ok", "serving", ""];
  if (!$("login").hidden) return;
  if (!silent) since = "";
  if (silent || (lost && !now)) {
    // The moment, not how long ago: what changes each second would be read aloud each second.
    since ||= now ? `since ${clock(new Date(Date.now() - stream.silence).toISOString())}` : "so far";
    state = "stale";
    text = now ? `no data ${since}` : "no daemon";
    why = `Nothing heard from the daemon ${since}${lost ? `: ${lost}` : ""}. ${now ? "What is shown is how it was; " : ""}this page goes on trying.`;
  } else if (!now) {
    [state, text] = ["waiting", "asking the daemon"];
  } else if (now.still) {
    state = "stale";
    text = `${now.still} stands still`;
    why = `${now.still} stands still: engines serve themselves. On the node: systemctl restart tierd`;
  } else if (now.age_s !== null && now.age_s * 1000 > STALE_MS) {
    state = "stale";
    text = "counters are old";
    why = "The pumps answer late, or one not at all, so the counters are not the latest.";
  } else if (now.frozen) {
    text = "serving, split frozen";
  }
  set($("state"), "data-state", state);
  setText($("state"), text);
  setText($("banner"), why);
  $("banner").hidden = !why;
  toggle(document.body, "stale", state === "stale");
}

async function fetchEvents() {
  const after = events[0]?.id ?? 0;
  if (fetching) return;
  fetching = true;
  let found = [];
  try {
    found = (await get(`/v1/events?limit=${EVENTS_MAX}&after=${after}`)).events;
  } catch (error) {
    if (error instanceof Refused) askForToken(error.message);
  } finally {
    fetching = false;
  }
  events = [...found.filter((one) => one.id > after), ...events].slice(0, EVENTS_MAX);
  grids.events.show(events.slice(0, 100).map((row) => ({ ...row, key: row.id })));
  showSplit();
}

async function fetchSlow(whole = false) {
  asked = performance.now();
  let found;
  try {
    const ask = [get(whole ? "/v1/history" : "/v1/history?points=30"), get("/v1/controller"), get("/v1/curves")];
    found = await Promise.all(ask);
  } catch (error) {
    if (error instanceof Refused) askForToken(error.message);
    else if (whole) asked = -Infinity; // the next tick asks for all of it again
    return;
  }
  const [history, seen, drawn] = found;
  series.take(history, whole);
  controller = seen;
  known = drawn.curves;
  grids.decisions.show(seen.decisions.map((row, at) => ({ ...row, key: `${row.time} ${at}` })));
  showChoice();
  showSplit();
}

// Which client the split and the curves are of.
function showChoice() {
  const choice = $("client");
  const wanted = controller.clients.map((one) => [one.client, `${one.engine} rank ${one.rank} (pid ${one.pid})`]);
  const text = JSON.stringify(wanted);
  if (choice.dataset.shown !== text) {
    const chosen = choice.value;
    choice.dataset.shown = text;
    choice.replaceChildren(...wanted.map(([value, title]) => element("option", { value }, title)));
    if (wanted.some(([value]) => value === chosen)) choice.value = chosen;
    if (!wanted.length) choice.append(element("option", { value: "" }, "none attached"));
  }
  choice.disabled = wanted.length < 2;
}

function showSplit() {
  if (!controller) return;
  const client = controller.clients.find((one) => one.client === $("client").value);
  const own = events.filter((event) => event.kind === "controller");
  splits.show(client, controller, own);
  curves.show(known ?? [], client);
}

function askForToken(why) {
  $("login").hidden = false;
  $("board").hidden = true;
  $("banner").hidden = true;
  setText($("refused"), why);
  set($("state"), "data-state", "waiting");
  setText($("state"), "a token is wanted");
  $("token").focus();
}

$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await enter($("token").value.trim());
    $("token").value = "";
    $("login").hidden = true;
    $("board").hidden = false;
    boot = "";
    stream.run();
  } catch (error) {
    setText($("refused"), error.message);
  }
});
$("client").addEventListener("change", showSplit);

setInterval(() => {
  const late = Date.now() - ticked > SLEPT_MS;
  ticked = Date.now();
  judge();
  if (!now || stream.silence > STALE_MS || !$("login").hidden) return;
  if (late || asked === -Infinity) fetchSlow(true);
  else if (performance.now() - asked > SLOW_MS) fetchSlow();
}, 500);

try {
  await enterByAddress();
} catch (error) {
  if (!(error instanceof Refused)) lost = error.message;
}
stream.run();
