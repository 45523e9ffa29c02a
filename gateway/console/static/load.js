// "Load it": bulk requests from this page, on and off, and probes of the first token without and with them.
//
// The load ends by itself, with the page, and after an error that no retry can mend. It never goes to a tier that is not
// bulk.

import { Refused, postJson, sentenceOf } from "./api.js";
import { streamChat } from "./completion.js";
import { byId, median, ms, say } from "./format.js";
import { MAX_LOAD_MS, askFor, pause, repeat } from "./traffic.js";

const CONNECTIONS = 2; // requests at a time; each asks for many answers
const PROBE_PERIOD_MS = 1000;
const PROBES_ALONE = 5; // probes before the load begins and after it has ended
const OPENAI_TIERS = ["default", "flex", "scale", "priority"]; // the ones that answers can name

export class Load {
  #button = byId("load");
  #note = byId("load-note");
  #history;
  #model = null; // an object of GET /v1/models
  #flex = "flex"; // the service_tier of a bulk tier; null if there is none
  #run = null; // the AbortController of the load under way
  #isLoaded = false;
  #probing = null; // the promise of the probes under way
  #probesLeft = 0;

  constructor(history) {
    this.#history = history;
    this.#button.addEventListener("click", () => (this.#run ? this.stop("") : this.#start()));
    window.addEventListener("pagehide", () => this.stop(""));
  }

  /** Ask a model of GET /v1/models from now on. A load on another one ends: the probes would not be beside it. */
  setModel(model) {
    if (model?.id !== this.#model?.id) this.stop("The bulk load has ended: another model is shown.");
    this.#model = model;
  }

  setTiers(tiers) {
    const bulk = tiers.find((tier) => !tier.isInteractive && tier.serviceTiers.length);
    this.#flex = tiers.length ? (bulk?.serviceTiers[0] ?? null) : "flex";
  }

  /** End the load. `reason` is said to the user. */
  stop(reason) {
    if (!this.#run) return;
    this.#run.abort();
    this.#run = null;
    this.#isLoaded = false;
    this.#probesLeft = PROBES_ALONE;
    this.#history.endLoad(Date.now() / 1000);
    this.#button.setAttribute("aria-pressed", "false");
    say(this.#button, "Load it");
    byId("load-size").disabled = false;
    say(this.#note, reason || `The bulk load is off.${this.#comparison()}`);
  }

  /** Return what the load did to first tokens, as a sentence; an empty text if too little was measured. */
  #comparison() {
    const [alone, loaded] = ["alone", "loaded"].map((kind) => median(this.#history.probes(kind)));
    if (alone === null || loaded === null) return "";
    return ` First tokens, median: ${ms(1000 * alone)} alone, ${ms(1000 * loaded)} beside bulk.`;
  }

  async #start() {
    const run = (this.#run = new AbortController());
    this.#button.setAttribute("aria-pressed", "true");
    say(this.#button, "Stop load");
    byId("load-size").disabled = true;
    say(this.#note, "Measuring first tokens without bulk …");
    try {
      await this.#check(run.signal);
      this.#probe();
      await this.#wait(PROBES_ALONE, run.signal);
      if (!run.signal.aborted) await this.#load(run);
    } catch (error) {
      if (!run.signal.aborted) this.stop(`The load has ended: ${sentenceOf(error)}`);
    }
  }

  /** Send one small request. Throws if it was not served in a bulk tier: a key may have none. */
  async #check(signal) {
    if (this.#flex === null) throw new Refused(400, "no bulk tier has a service_tier.");
    const body = { ...askFor(this.#model, 1), max_tokens: 1, service_tier: this.#flex };
    const answer = await (await postJson("v1/chat/completions", body, { signal })).json();
    const isNamed = OPENAI_TIERS.includes(this.#flex);
    if (isNamed && answer.service_tier !== this.#flex)
      throw new Refused(403, `this API key may not use ${this.#flex}, so the load would reach ${answer.service_tier}.`);
  }

  /** Wait until so many more probes have ended. */
  async #wait(probes, signal) {
    for (let end = this.#numProbes + probes; this.#numProbes < end && !signal.aborted; ) await pause(100, signal);
  }
  #numProbes = 0;

  async #load(run) {
    const size = Number(byId("load-size").value);
    const timer = setTimeout(() => this.stop(`The bulk load has ended by itself.${this.#comparison()}`), MAX_LOAD_MS);
    run.signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
    this.#isLoaded = true;
    this.#history.beginLoad(Date.now() / 1000);
    say(this.#note, `${size} bulk requests run. They end by themselves after ${MAX_LOAD_MS / 60_000} minutes.`);
    const body = { ...askFor(this.#model, size / CONNECTIONS), service_tier: this.#flex };
    await Promise.all(Array.from({ length: CONNECTIONS }, () => repeat(body, run.signal)));
  }

  /** Probe until some time after the load's end. */
  #probe() {
    this.#probing ??= this.#probeOn().finally(() => (this.#probing = null));
  }

  async #probeOn() {
    for (let failed = 0; this.#run || (this.#probesLeft-- > 0 && failed < 5); ) {
      const wasLoaded = this.#isLoaded;
      try {
        const seconds = await this.#firstToken();
        if (wasLoaded === this.#isLoaded) this.#history.addProbe(Date.now() / 1000, seconds, wasLoaded);
        failed = 0;
      } catch {
        failed += 1; // the load's own requests tell the user what is wrong
      }
      this.#numProbes += 1;
      await pause(PROBE_PERIOD_MS);
    }
  }

  async #firstToken() {
    const content = `Repeat: ${Math.random().toString(36).slice(2, 8)}`; // differs, so that it is computed each time
    const answer = await streamChat({ model: this.#model.id, messages: [{ role: "user", content }], max_tokens: 4 });
    return (answer.firstMs ?? answer.totalMs) / 1000;
  }
}

/** Return the entries of the legend of first tokens. */
export function probeLegend(history) {
  const text = (kind) => {
    const middle = median(history.probes(kind));
    return middle === null ? "–" : ms(1000 * middle);
  };
  return [
    { label: "Probes alone, median", text: text("alone"), color: "--i1", kind: "ring" },
    { label: "Probes beside bulk, median", text: text("loaded"), color: "--b1", kind: "dot" },
  ];
}
