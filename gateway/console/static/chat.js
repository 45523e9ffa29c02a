// The playground: a conversation whose answers show their tier and their times.

import { sentenceOf } from "./api.js";
import { streamChat } from "./completion.js";
import { byId, element, ms, say } from "./format.js";

const NAMED = [["auto", "auto"], ["default", "default"], ["flex", "flex"]]; // where the tiers are not known

export class Chat {
  #form = byId("chat-form");
  #list = byId("messages");
  #prompt = byId("prompt");
  #messages = [];
  #running = null; // the AbortController of the answer under way

  constructor() {
    this.setTiers([]);
    this.#form.addEventListener("submit", (event) => (event.preventDefault(), this.#send()));
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    this.#form.addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("chat-clear").addEventListener("click", () => this.#clear());
  }

  /** Offer the models of GET /v1/models. */
  setModels(models) {
    const chosen = byId("chat-model").value;
    byId("chat-model").replaceChildren(...models.map(({ id }) => element("option", { selected: id === chosen }, id)));
    byId("model-choice").hidden = models.length < 2;
  }

  /** Ask a model of GET /v1/models from now on. Half of its context is offered for an answer, at most. */
  setModel(model) {
    const limit = byId("max-tokens");
    limit.max = model?.max_model_len ?? 100_000;
    limit.value = Math.min(limit.valueAsNumber, Math.floor(limit.max / 2));
  }

  /** Offer the tiers that requests can name; without knowledge of the tiers, OpenAI's names. */
  setTiers(tiers) {
    const known = tiers.filter((tier) => tier.serviceTiers.length).map((tier) => [tier.serviceTiers[0], tier.name]);
    const chosen = this.#form.elements.tier?.value;
    const offered = known.length ? known : NAMED;
    const checked = offered.some(([value]) => value === chosen) ? chosen : offered[0][0];
    const choices = offered.map(([value, label]) => {
      const input = element("input", { type: "radio", name: "tier", value, checked: value === checked });
      return element("label", {}, input, element("span", {}, label === value ? label : `${label} (${value})`));
    });
    const legend = this.#form.querySelector("legend");
    byId("tier-choice").replaceChildren(legend, ...choices);
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#list.replaceChildren(element("p", { class: "empty" }, "Ask something."));
    this.#prompt.focus();
  }

  async #send() {
    const text = this.#prompt.value.trim();
    if (!text || this.#running) return;
    this.#prompt.value = "";
    this.#list.querySelector(".empty")?.remove();
    this.#messages.push({ role: "user", content: text });
    this.#add("user", text);
    const body = element("p", { class: "said" });
    const facts = element("p", { class: "facts" }, "waiting for the first token …");
    this.#list.append(element("div", { class: "message assistant" }, body, facts));
    this.#setRunning(new AbortController());
    try {
      await this.#answer(body, facts);
    } catch (error) {
      if (this.#messages.at(-1)?.content === text) this.#messages.pop(); // the next question goes without this one
      facts.classList.add("bad");
      say(facts, sentenceOf(error));
    } finally {
      this.#setRunning(null);
      say(byId("chat-said"), `${body.textContent.slice(0, 400)}. ${facts.textContent}`);
    }
  }

  async #answer(body, facts) {
    const tier = this.#form.elements.tier.value;
    const messages = this.#messages;
    const wanted = {
      model: byId("chat-model").value,
      messages,
      max_tokens: byId("max-tokens").valueAsNumber || 256,
      service_tier: tier,
    };
    const onText = (text) => {
      const isAtEnd = this.#list.scrollHeight - this.#list.scrollTop - this.#list.clientHeight < 40;
      body.append(text);
      if (isAtEnd) this.#list.scrollTop = this.#list.scrollHeight;
    };
    const answer = await streamChat(wanted, { signal: this.#running.signal, onText });
    if (messages === this.#messages) messages.push({ role: "assistant", content: body.textContent });
    say(facts, factsOf(answer, tier));
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  #add(role, text) {
    this.#list.append(element("div", { class: `message ${role}` }, element("p", { class: "said" }, text)));
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  #setRunning(controller) {
    const hadFocus = [byId("stop"), byId("send")].includes(document.activeElement);
    this.#running = controller;
    byId("stop").disabled = !controller;
    byId("send").disabled = Boolean(controller);
    if (hadFocus) byId(controller ? "stop" : "prompt").focus(); // a disabled button would lose the focus
  }
}

/** Return the line under an answer: tier, first token, total, tokens. */
function factsOf({ firstMs, totalMs, tier, rule, usage, finish }, asked) {
  const isOther = asked !== "auto" && tier && tier !== asked;
  const tokens = usage?.completion_tokens;
  const parts = [
    tier && `tier ${tier}${isOther ? ` (asked for ${asked})` : ""}`,
    rule && `by rule ${rule}`,
    firstMs === null ? "no token" : `first token ${ms(firstMs)}`,
    `total ${ms(totalMs)}`,
    tokens && `${tokens} tokens`,
    finish === "stopped" && "stopped",
    finish === "length" && "cut off at the limit of tokens",
  ];
  return parts.filter(Boolean).join(" · ");
}
