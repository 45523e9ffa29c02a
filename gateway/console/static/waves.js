// "Chat waves": interactive requests for ten of every twenty seconds, so that anyone sees bulk make room for them.

import { sentenceOf } from "./api.js";
import { byId, say } from "./format.js";
import { MAX_LOAD_MS, askFor, pause, repeat } from "./traffic.js";

const ANSWERS = 8; // at a time
const WAVE_MS = 10_000;

export class Waves {
  #button = byId("waves");
  #model = null; // an object of GET /v1/models
  #tier = "default"; // the service_tier of an interactive tier
  #run = null; // the AbortController of the waves under way

  constructor() {
    this.#button.addEventListener("click", () => (this.#run ? this.stop() : this.#start()));
    window.addEventListener("pagehide", () => this.stop());
  }

  /** Ask a model of GET /v1/models from now on. */
  setModel(model) {
    this.#model = model;
  }

  setTiers(tiers) {
    this.#tier = tiers.find((tier) => tier.isInteractive && tier.serviceTiers.length)?.serviceTiers[0] ?? "default";
  }

  stop() {
    this.#run?.abort();
    this.#run = null;
    this.#button.setAttribute("aria-pressed", "false");
    say(this.#button, "Chat waves");
  }

  async #start() {
    const { signal } = (this.#run = new AbortController());
    this.#button.setAttribute("aria-pressed", "true");
    say(this.#button, "Stop waves");
    const timer = setTimeout(() => this.stop(), MAX_LOAD_MS);
    signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
    try {
      while (!signal.aborted) await this.#wave(signal);
    } catch (error) {
      if (signal.aborted) return;
      this.stop();
      say(byId("load-note"), `The waves have ended: ${sentenceOf(error)}`);
    }
  }

  async #wave(signal) {
    const wave = AbortSignal.any([signal, AbortSignal.timeout(WAVE_MS)]);
    await repeat({ ...askFor(this.#model, ANSWERS), service_tier: this.#tier }, wave);
    await pause(WAVE_MS, signal);
  }
}
