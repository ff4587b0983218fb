// The daemon's overview, every second, for as long as the page is open: over a daemon that ends and
// starts anew, a network that goes, and a browser that slept.

import { detail, headers, Refused } from "./session.js";

const SILENT_MS = 6000; // the daemon speaks every second; after this the connection is made anew
const WAIT_MS = [500, 1000, 2000, 3000];

export class Stream {
  // heard(overview), lost(why), refused(why): what the page does.
  constructor(path, { heard, lost, refused }) {
    this.path = path;
    this.heard = heard;
    this.lost = lost;
    this.refused = refused;
    this.last = performance.now();
    this.running = false;
  }

  // Milliseconds since the daemon last spoke.
  get silence() {
    return performance.now() - this.last;
  }

  async run() {
    if (this.running) return;
    this.running = true;
    let failed = 0;
    while (this.running) {
      try {
        await this.#read(() => (failed = 0));
        this.lost("the daemon ended the connection");
      } catch (error) {
        if (error instanceof Refused) {
          this.running = false;
          this.refused(error.message);
          return;
        }
        this.lost(this.why ?? error.message);
      }
      await pause(WAIT_MS[Math.min(failed, WAIT_MS.length - 1)]);
      failed += 1;
    }
  }

  async #read(spoke) {
    const abort = new AbortController();
    this.why = undefined;
    let alarm;
    const wind = () => {
      clearTimeout(alarm);
      alarm = setTimeout(() => {
        this.why = "the daemon says nothing";
        abort.abort();
      }, SILENT_MS);
    };
    wind();
    try {
      const answer = await fetch(this.path, {
        headers: headers({ Accept: "text/event-stream" }), cache: "no-store", signal: abort.signal,
      });
      if (answer.status === 401) throw new Refused(await detail(answer));
      if (!answer.ok) throw new Error(await detail(answer));
      for await (const text of events(answer.body)) {
        wind();
        this.last = performance.now();
        spoke();
        this.heard(JSON.parse(text));
      }
    } finally {
      clearTimeout(alarm);
      abort.abort();
    }
  }
}

// The data of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      rest = rest.slice(end + 2);
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

function pause(ms) {
  return new Promise((done) => {
    const go = () => {
      clearTimeout(timer);
      removeEventListener("online", go);
      document.removeEventListener("visibilitychange", seen);
      done();
    };
    const seen = () => document.visibilityState === "visible" && go();
    const timer = setTimeout(go, ms);
    addEventListener("online", go);
    document.addEventListener("visibilitychange", seen);
  });
}
