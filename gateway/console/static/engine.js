// The store and the workers: from GET /ready, which needs no key, GET /admin/overview, and the reports of the feed.

import { getJson, ofModel } from "./api.js";
import { byId, duration, element, percent, say, seconds } from "./format.js";

const PERIOD_MS = 5000;

/** One row of the list: a name, a state, and named figures. */
class Row {
  #figures = element("dl", { class: "figures" });
  #values = new Map();
  #state = element("span", { class: "state" });

  constructor(name, about) {
    const head = element("p", { class: "row-head" }, element("b", {}, name), element("span", {}, about), this.#state);
    this.root = element("li", { class: "part" }, head, this.#figures);
  }

  /** `kind` of the state is "good", "bad", or empty for neither. */
  show(state, kind, figures) {
    say(this.#state, state);
    this.#state.dataset.state = kind;
    for (const [name, text] of Object.entries(figures)) {
      if (!this.#values.has(name)) {
        const value = element("dd");
        this.#values.set(name, value);
        this.#figures.append(element("div", {}, element("dt", {}, name), value));
      }
      say(this.#values.get(name), text);
    }
    for (const [name, value] of this.#values) if (!(name in figures)) say(value, "–"); // it is not known any more
  }
}

export class Engine {
  #list = byId("engine-list");
  #rows = new Map();
  #reports = [];
  #ready; // the newest answer of GET /ready; null: none came; undefined: it was not asked yet
  #overview = null; // the newest answer of GET /admin/overview
  #onReady;
  #wake = () => {};

  /** `onReady` is called with each answer of GET /ready; null if there is none. */
  constructor(onReady) {
    this.#onReady = onReady;
  }

  /** Show the workers' reports of the feed. */
  take(workers) {
    this.#reports = workers;
    this.#show();
  }

  /** Read everything now, for example with another key. */
  refresh() {
    this.#wake();
  }

  async run() {
    for (;;) {
      if (!document.hidden) await this.#refresh();
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, PERIOD_MS);
        this.#wake = () => (clearTimeout(timer), resolve());
      });
    }
  }

  async #refresh() {
    this.#ready = await fetch("ready", { cache: "no-store" }).then((response) => response.json()).catch(() => null);
    const isAdmin = document.body.dataset.admin === "yes";
    this.#overview = isAdmin ? await getJson(ofModel("admin/overview")).catch(() => null) : null;
    this.#show();
    this.#onReady(this.#ready);
  }

  #show() {
    if (this.#ready === undefined) return;
    const { workers = [], starting = [] } = this.#ready ?? {};
    const ids = new Set(["store", ...workers.map(({ id }) => id), ...starting.map(({ id }) => startOf(id))]);
    for (const [id, row] of this.#rows) if (!ids.has(id)) (row.root.remove(), this.#rows.delete(id));
    this.#showStore(this.#ready, this.#overview);
    for (const worker of workers) this.#showWorker(worker, this.#overview?.workers.find(({ id }) => id === worker.id));
    for (const start of starting) this.#row(startOf(start.id), start.id, "starts").show(phaseOf(start), "", {});
  }

  #row(id, name, about) {
    if (!this.#rows.has(id)) {
      this.#rows.set(id, new Row(name, about));
      this.#list.append(this.#rows.get(id).root);
    }
    return this.#rows.get(id);
  }

  #showStore(ready, overview) {
    const row = this.#row("store", "Store", "queues, leases, batches");
    if (!ready) return row.show("the gateway does not answer", "bad", {});
    const waiting = Object.values(ready.waiting).reduce((sum, depth) => sum + depth, 0);
    const isAway = ready.missing.includes("store");
    const state = ready.refusal ?? (isAway ? "does not answer" : ready.draining ? "gateway drains" : "ready");
    row.show(state, isAway || ready.draining ? "bad" : "good", {
      Waiting: String(waiting),
      ...(overview?.store.answers ? { "Answers in": `${overview.store.latency_ms.toFixed(1)} ms` } : {}),
    });
  }

  #showWorker(worker, seen) {
    const report = this.#reports.find(({ id }) => id === worker.id);
    const row = this.#row(worker.id, worker.id, `${worker.device} · ${worker.models.join(", ")}`);
    if (this.#ready.missing.includes("store")) return row.show("not known without the store", "", {});
    row.show("alive", "good", { ...(report ? figuresOf(report) : {}), ...(seen ? machineOf(seen) : {}) });
  }
}

const startOf = (id) => `start of ${id}`; // the key of a row: the same worker may live already, while another one starts
const phaseOf = ({ phase, seconds, share }) => `${phase}, ${share === null ? duration(seconds) : percent(share)}`;

function figuresOf(report) {
  const held = Object.values(report.tiers).reduce((sum, { requests }) => sum + (requests?.running ?? 0), 0);
  const figures = {
    Running: String(held),
    "KV in use": percent(report.kv_usage, 1),
    "Prediction error": percent(report.step_time_error),
    "Step limit of bulk": seconds(report.bulk_step_s),
    "Overhead a step": seconds(report.host_overhead_s),
  };
  const { upstream } = report;
  if (upstream) figures.Upstream = upstream.is_reachable ? `${upstream.in_flight} streams` : "does not answer";
  return figures;
}

/** Return what GET /admin/overview says of a worker: how busy it is, and its GPUs. */
function machineOf({ busy, gpus }) {
  const figures = busy === null ? {} : { Busy: percent(busy) };
  gpus.forEach((gpu, i) => {
    const memory = `${(gpu.memory_used_mb / 1024).toFixed(1)} of ${(gpu.memory_total_mb / 1024).toFixed(0)} GiB`;
    figures[gpus.length > 1 ? `GPU ${i}` : "GPU"] = gpu.busy === null ? memory : `${percent(gpu.busy)}, ${memory}`;
  });
  return figures;
}
