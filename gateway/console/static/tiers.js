// One card for each tier: what waits and runs, latencies against the SLO, and the controller's knobs.

import { colorsOf } from "./charts.js";
import { byId, count, element, percent, say, seconds } from "./format.js";

const KNOBS = [
  ["max_wait_ms", "Max-wait", (value) => `${Math.round(value)} ms`],
  ["batch_size", "Batch size", count],
  ["batch_tokens", "Tokens a step", count],
];

/** Return the tiers of GET /admin/tiers, from the highest priority to the lowest. */
export function tiersOf(document) {
  const routing = document.routing?.enabled ? Object.entries(document.routing.rules) : [];
  const tiers = Object.entries(document.tiers).map(([name, tier]) => {
    const { ttft_p99_ms: ttftMs, itl_p99_ms: itlMs } = tier.slo ?? {};
    return {
      name,
      priority: tier.priority,
      serviceTiers: tier.service_tiers ?? [],
      rules: routing.filter(([, rule]) => rule.tier === name).map(([rule]) => rule),
      ttftSloS: ttftMs ? ttftMs / 1000 : null,
      itlSloS: itlMs ? itlMs / 1000 : null,
      isInteractive: Boolean(ttftMs || itlMs),
      maxSlowdown: tier.max_slowdown ?? null,
    };
  });
  return tiers.sort((a, b) => b.priority - a.priority);
}

/** Return what all workers together say of a tier: sums of requests, and the worst of latencies and attainment. */
export function summaryOf(tier, state) {
  const reports = state.workers.map((worker) => worker.tiers?.[tier]).filter(Boolean);
  const sum = (read) => reports.reduce((total, report) => total + (read(report) ?? 0), 0);
  const worst = (read, choose) => {
    const known = reports.map(read).filter((value) => value !== null && value !== undefined);
    return known.length ? choose(...known) : null;
  };
  return {
    waiting: (state.waiting[tier]?.requests ?? 0) + sum((report) => report.requests?.waiting),
    running: sum((report) => report.requests?.running),
    paused: sum((report) => report.requests && report.requests.paused + report.requests.swapped),
    arrivals: sum((report) => report.signals.arrivals_per_s),
    ttftS: worst((report) => report.signals.ttft_p99_s, Math.max),
    itlS: worst((report) => report.signals.itl_p99_s, Math.max),
    attainment: worst((report) => report.signals.attainment, Math.min),
    slowdowns: { ttft: slowest(reports, "ttft"), e2e: slowest(reports, "e2e") },
    minShare: worst((report) => report.signals.floor_share, Math.max),
    stepSequences: worst((report) => report.step_sequences, Math.max),
    knobs: reports[0]?.knobs ?? null,
  };
}

/** Return the measured slowdown of a kind of latency on the worker where it is certain to be the largest; null: unknown. */
function slowest(reports, kind) {
  const known = reports.map((report) => report.bulk_slowdown?.[kind]).filter(Boolean);
  return known.length ? known.reduce((a, b) => (b.low > a.low ? b : a)) : null;
}

const slowdownLabel = (promise) => `Times as long because of bulk${promise ? `, at most ${promise} promised` : ""}`;

function slowdownText({ ttft, e2e }) {
  const text = ({ value, low, high }) => `${value.toFixed(2)} (${low.toFixed(2)}–${high.toFixed(2)})`;
  return [ttft && `first token ${text(ttft)}`, e2e && `answers ${text(e2e)}`].filter(Boolean).join(", ") || "not measured yet";
}

export class TierCards {
  #list = byId("tier-cards");
  #cards = new Map();

  setTiers(tiers) {
    const colors = colorsOf(tiers);
    this.#cards = new Map(tiers.map((tier) => [tier.name, new TierCard(tier, colors.get(tier.name))]));
    this.#list.replaceChildren(...[...this.#cards.values()].map((card) => card.root));
  }

  /** Show a state of the feed. `shares` is the present share of engine time, by tier. */
  show(state, shares) {
    for (const [name, card] of this.#cards) card.show(summaryOf(name, state), shares.get(name));
  }
}

class TierCard {
  #tier;
  #figures = new Map();
  #meters = new Map();
  #knobs = new Map();

  constructor(tier, color) {
    this.#tier = tier;
    const title = element("h3", { id: `tier-${tier.name}` }, tier.name);
    const kind = tier.isInteractive ? "interactive" : "bulk";
    const names = tier.serviceTiers.join(", ");
    const rules = tier.rules.length ? `rules ${tier.rules.join(", ")}` : "";
    const badge = element("p", { class: "badge" }, [kind, names && `service_tier ${names}`, rules].filter(Boolean).join(" · "));
    const figures = element("dl", { class: "figures" }, ...this.#makeFigures());
    const knobs = element("dl", { class: "knobs" }, ...this.#makeKnobs());
    this.root = element("article", { class: "card tier", "aria-labelledby": title.id }, title, badge, figures, ...this.#makeMeters(), knobs);
    this.root.style.setProperty("--tier", `var(${color})`);
  }

  #makeFigures() {
    const names = ["Waiting", "Running", "Paused", "Arrivals", "In a step", "Engine"];
    return names.map((name) => element("div", {}, element("dt", {}, name), this.#kept(this.#figures, name, "dd")));
  }

  #makeKnobs() {
    return KNOBS.map(([name, label]) => element("div", {}, element("dt", {}, label), this.#kept(this.#knobs, name, "dd")));
  }

  #makeMeters() {
    const tier = this.#tier;
    const meters = [
      tier.ttftSloS && ["ttftS", "First token, p99", tier.ttftSloS],
      tier.itlSloS && ["itlS", "Gap of tokens, p99", tier.itlSloS],
      tier.isInteractive && ["attainment", "Requests that met all targets", null],
      tier.isInteractive && ["slowdowns", slowdownLabel(tier.maxSlowdown), null, false],
      !tier.isInteractive && ["minShare", "Min share of engine time", null],
    ];
    return meters.filter(Boolean).map(([name, label, slo, hasBar = true]) => {
      const meter = new Meter(`${tier.name}: ${label}`, label, slo, hasBar);
      this.#meters.set(name, meter);
      return meter.root;
    });
  }

  #kept(map, name, tag) {
    const made = element(tag, {}, "–");
    map.set(name, made);
    return made;
  }

  show(summary, share) {
    const texts = {
      Waiting: count(summary.waiting),
      Running: count(summary.running),
      Paused: count(summary.paused),
      Arrivals: `${summary.arrivals.toFixed(1)}/s`,
      "In a step": summary.stepSequences === null ? "–" : summary.stepSequences.toFixed(1),
      Engine: percent(share),
    };
    for (const [name, text] of Object.entries(texts)) say(this.#figures.get(name), text);
    this.#meters.get("ttftS")?.showTime(summary.ttftS);
    this.#meters.get("itlS")?.showTime(summary.itlS);
    this.#meters.get("attainment")?.showShare(summary.attainment, "no request has ended lately", true);
    this.#meters.get("slowdowns")?.showText(slowdownText(summary.slowdowns));
    this.#meters.get("minShare")?.showShare(summary.minShare, "none");
    for (const [name, , text] of KNOBS) say(this.#knobs.get(name), knobText(summary.knobs?.[name], text));
  }
}

function knobText(knob, text) {
  if (!knob) return "–";
  const bounds = `${text(knob.min)} to ${text(knob.max)}`;
  if (knob.pinned) return `${text(knob.value)}, pinned`;
  const value = knob.dry_run ? `${text(knob.value)}, wants ${text(knob.chosen)}` : `${text(knob.value)} (${bounds})`;
  return knob.reason ? `${value}: ${knob.reason}` : value;
}

/** A text with a bar: a latency against its SLO, or a share; some have no bar. */
class Meter {
  #slo;
  #bar;
  #text;

  constructor(name, label, slo, hasBar) {
    this.#slo = slo;
    const fill = element("i");
    this.#bar = element("div", { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": slo ?? 1 }, fill);
    this.#text = element("b", {}, "–");
    this.root = element("div", { class: "meter" }, element("span", {}, label), this.#text);
    if (hasBar) this.root.append(this.#bar);
  }

  showTime(value) {
    if (value === null) return this.#show(0, "too few requests", "");
    const isMissed = value > this.#slo;
    const text = `${seconds(value)} of ${seconds(this.#slo)}${isMissed ? ", missed" : ""}`;
    this.#show(value / this.#slo, text, isMissed ? "bad" : "good", value);
  }

  showText(text) {
    this.#show(0, text, "");
  }

  showShare(value, unknown, isGoal = false) {
    if (value === null) return this.#show(0, unknown, "");
    this.#show(value, percent(value, value < 0.1 || isGoal ? 1 : 0), isGoal ? (value < 0.99 ? "bad" : "good") : "");
  }

  #show(share, text, state, value = share) {
    say(this.#text, text);
    this.#bar.dataset.state = state;
    this.#bar.firstChild.style.width = `${100 * Math.min(1, share)}%`;
    this.#bar.setAttribute("aria-valuenow", value.toFixed(3));
    this.#bar.setAttribute("aria-valuetext", text);
  }
}
