// The controller's newest decisions, in words.

import { byId, clock, count, element } from "./format.js";

const MOST = 60; // decisions that the list keeps
const KNOBS = { batch_size: "batch size", batch_tokens: "tokens a step", max_wait_ms: "max-wait" };

const valueOf = (knob, value) => (knob === "max_wait_ms" ? `${Math.round(value)} ms` : count(value));

/** Return decisions that belong together as one: moves of one tier at one time for one reason. */
function grouped(decisions) {
  const groups = new Map();
  for (const decision of decisions) {
    const key = [decision.atMs, decision.tier, decision.reason].join();
    groups.set(key, [...(groups.get(key) ?? []), decision]);
  }
  return [...groups.values()];
}

function sentenceOf(group) {
  const moves = group.map(({ knob, old, new: to }) => `${KNOBS[knob] ?? knob} ${valueOf(knob, old)} → ${valueOf(knob, to)}`);
  return `${moves.join(", ")}: ${group[0].reason}${group[0].acted ? "" : " (dry run: not done)"}`;
}

export class Decisions {
  #list = byId("decision-list");

  clear() {
    this.#list.replaceChildren(element("li", { class: "empty" }, "No knob has moved: nothing observed asked for it. The cards of the tiers say what is in force, and why."));
  }

  /** Add the decisions of one event, which are new since the last one. */
  add(workers) {
    const found = workers.flatMap((worker) =>
      worker.decisions.map((decision) => ({ ...decision, atMs: Math.round(worker.at_ms - 1000 * decision.ago_s) })),
    );
    if (!found.length) return;
    found.sort((a, b) => a.atMs - b.atMs);
    this.#list.querySelector(".empty")?.remove();
    this.#list.prepend(...grouped(found).map(itemOf).reverse());
    while (this.#list.children.length > MOST) this.#list.lastChild.remove();
  }
}

function itemOf(group) {
  const [{ atMs, tier }] = group;
  const time = element("time", { dateTime: new Date(atMs).toISOString() }, clock(atMs));
  return element("li", {}, time, element("b", {}, tier), element("span", {}, sentenceOf(group)));
}
