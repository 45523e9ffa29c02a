// The live connection to GET /admin/sla/stream. It is closed while the page is hidden, and opened again after an error.

import { Refused, events, ofModel, request } from "./api.js";

const SILENT_MS = 6000; // without an event for so long, the connection counts as lost; events come twice a second
const RETRY_MS = { first: 1000, most: 10_000 };
const FOREVER_MS = 2 ** 31 - 1; // until `restart` is called

/**
 * Keep one connection open. Calls `on.state(data)` for each event, `on.begin()` before the first event of a connection,
 * `on.store(message)` if the store does not answer, and `on.lost(error)` after the end of a connection.
 */
export class Feed {
  #on;
  #connection = null;
  #isUrgent = false; // whether to open the next connection without a wait
  #wake = () => {};

  constructor(on) {
    this.#on = on;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Open the connection anew, for example with another key or model. */
  restart() {
    this.#isUrgent = true;
    this.#connection?.abort();
    this.#wake();
  }

  async run() {
    let wait = RETRY_MS.first;
    for (;;) {
      await this.#visible();
      const began = performance.now();
      this.#isUrgent = false;
      const isRefused = await this.#read();
      wait = performance.now() - began > RETRY_MS.most ? RETRY_MS.first : Math.min(RETRY_MS.most, 2 * wait);
      if (!this.#isUrgent) await this.#pause(isRefused ? FOREVER_MS : wait);
    }
  }

  async #visible() {
    while (document.hidden) await this.#pause(FOREVER_MS);
  }

  /** Wait for a time, or until `restart` is called. */
  #pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.#wake = () => (clearTimeout(timer), resolve());
    });
  }

  /** Read events until the connection ends. Return whether it was refused for lack of rights. */
  async #read() {
    const connection = (this.#connection = new AbortController());
    let watchdog = setTimeout(() => connection.abort(), SILENT_MS);
    try {
      const response = await request(ofModel("admin/sla/stream"), { signal: connection.signal });
      this.#on.begin();
      for await (const { event, data } of events(response)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => connection.abort(), SILENT_MS);
        if (event === "sla") this.#on.state(JSON.parse(data));
        if (event === "error") this.#on.store(JSON.parse(data).error.message);
      }
      this.#on.lost(null);
      return false;
    } catch (error) {
      if (!this.#isUrgent) this.#on.lost(error instanceof Refused ? error : null);
      return [401, 403].includes(error.status);
    } finally {
      clearTimeout(watchdog);
    }
  }
}
