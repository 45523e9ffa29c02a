// What the charts show: the last minutes of engine time by tier, of first tokens, and of the load from this page.

export const SPAN_S = 240; // seconds that the charts show

/** A list of rows {t, …} of the last `SPAN_S` seconds. `t` is Unix seconds by this browser's clock. */
class Rows {
  list = [];

  add(row) {
    this.list.push(row);
    const oldest = row.t - SPAN_S - 5;
    while (this.list[0].t < oldest) this.list.shift();
  }
}

export class History {
  shares = new Rows(); // {t, shares: Map of tier to share of engine time}; the map is empty where nothing is known
  firsts = new Rows(); // {t, p99, alone, loaded}: seconds; each row has one of them
  loads = []; // [from, to] of each load, in Unix seconds; `to` is null while it runs
  #before = new Map(); // the last report of each worker, by its id
  #rates = new Map(); // by worker id: Map of tier to share

  /** Take the workers' reports of one event. A share is the mean over the workers. */
  addReports(workers, t) {
    const isNew = workers.map((worker) => this.#measure(worker)).includes(true);
    const alive = new Set(workers.map((worker) => worker.id));
    for (const id of this.#rates.keys()) if (!alive.has(id)) this.#forget(id);
    const isLost = !this.#rates.size && this.now().size > 0;
    if (isNew || isLost) this.shares.add({ t, shares: this.#mean() });
  }

  /** Return the present share of engine time, by tier; empty if nothing is known. */
  now() {
    return this.shares.list.at(-1)?.shares ?? new Map();
  }

  /** Forget what was shown, for another model is shown from now on. */
  clear() {
    this.shares.list = [];
    this.firsts.list = [];
  }

  /** Begin anew after a gap: nothing is known of the time between. */
  addGap(t) {
    this.#before.clear();
    this.#rates.clear();
    this.shares.add({ t, shares: new Map() });
    this.firsts.add({ t });
  }

  addP99(t, seconds) {
    this.firsts.add({ t, p99: seconds });
  }

  addProbe(t, seconds, isLoaded) {
    this.firsts.add(isLoaded ? { t, loaded: seconds } : { t, alone: seconds });
  }

  /** Return the first tokens of one kind ("alone" or "loaded"), in seconds. */
  probes(kind) {
    return this.firsts.list.map((row) => row[kind]).filter((seconds) => seconds !== undefined);
  }

  beginLoad(t) {
    this.loads.push([t, null]);
  }

  endLoad(t) {
    const last = this.loads.at(-1);
    if (last) last[1] ??= t;
  }

  #forget(id) {
    this.#rates.delete(id);
    this.#before.delete(id);
  }

  #measure(worker) {
    const before = this.#before.get(worker.id);
    if (before?.at_ms === worker.at_ms) return false;
    this.#before.set(worker.id, worker);
    if (!before) return false;
    const elapsedS = (worker.at_ms - before.at_ms) / 1000;
    const rates = new Map();
    for (const [tier, { engine_s }] of Object.entries(worker.tiers)) {
      const used = engine_s - (before.tiers[tier]?.engine_s ?? engine_s); // negative after the worker's restart
      rates.set(tier, Math.min(1, Math.max(0, used / elapsedS)));
    }
    this.#rates.set(worker.id, rates);
    return true;
  }

  #mean() {
    const sums = new Map();
    for (const rates of this.#rates.values())
      for (const [tier, rate] of rates) sums.set(tier, (sums.get(tier) ?? 0) + rate / this.#rates.size);
    return sums;
  }
}
