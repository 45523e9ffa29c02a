// Batches: upload by drag and drop, progress, cancellation, and download of results.

import { Refused, getJson, postJson, request, sentenceOf } from "./api.js";
import { byId, count, duration, element, say } from "./format.js";

const SHOWN = 8; // newest batches in the list
const PERIOD_MS = { active: 1500, idle: 15_000, refused: 2 ** 31 - 1 }; // refused: until `refresh` is called
const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);
const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank"];
const EXAMPLE_LINES = 40;

export class Batches {
  #list = byId("batch-list");
  #note = byId("batch-note");
  #rows = new Map();
  #isAway = false; // whether the list could not be read the last time
  #model;
  #wake = () => {};

  /** `model` returns the name of the model for the example. */
  constructor(model) {
    this.#model = model;
    const drop = byId("drop");
    const input = byId("batch-file");
    input.addEventListener("change", () => {
      if (input.files.length) this.#submit(input.files[0]);
      input.value = "";
    });
    for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => mark(event, true));
    for (const name of ["dragleave", "drop"]) drop.addEventListener(name, (event) => mark(event, false));
    drop.addEventListener("drop", (event) => event.dataTransfer.files.length && this.#submit(event.dataTransfer.files[0]));
    byId("batch-example").addEventListener("click", () => this.#submit(exampleOf(this.#model())));
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Read the list now. */
  refresh() {
    this.#wake();
  }

  async run() {
    for (;;) {
      const period = document.hidden ? "idle" : await this.#show();
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, PERIOD_MS[period]);
        this.#wake = () => (clearTimeout(timer), resolve());
      });
    }
  }

  async #submit(file) {
    try {
      say(this.#note, `Uploading ${file.name} …`);
      const endpoint = await endpointOf(file);
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file);
      const stored = await (await request("v1/files", { method: "POST", body: form })).json();
      const batch = { input_file_id: stored.id, endpoint, completion_window: "24h", metadata: { file: file.name.slice(0, 500) } };
      await postJson("v1/batches", batch);
      say(this.#note, `${file.name} is submitted.`);
    } catch (error) {
      say(this.#note, `${file.name} is not submitted: ${sentenceOf(error)}`);
    }
    this.refresh();
  }

  /** Show the newest batches. Return the name of the period until the next time. */
  async #show() {
    try {
      const page = await getJson(`v1/batches?limit=${SHOWN}`);
      for (const [id, row] of this.#rows)
        if (!page.data.some((batch) => batch.id === id)) (row.root.remove(), this.#rows.delete(id));
      page.data.forEach((batch, i) => this.#place(batch, i));
      if (this.#isAway) say(this.#note, "");
      this.#isAway = false;
      return page.data.some((batch) => !ENDED.has(batch.status)) ? "active" : "idle";
    } catch (error) {
      if (error.status !== 401) say(this.#note, sentenceOf(error));
      this.#isAway = true;
      return error instanceof Refused && error.status < 500 ? "refused" : "idle";
    }
  }

  #place(batch, i) {
    if (!this.#rows.has(batch.id)) {
      const row = new Row(batch, (action) => this.#act(action));
      this.#rows.set(batch.id, row);
      this.#list.insertBefore(row.root, this.#list.children[i] ?? null);
    }
    this.#rows.get(batch.id).show(batch);
  }

  async #act(action) {
    try {
      await action();
    } catch (error) {
      say(this.#note, sentenceOf(error));
    }
    this.refresh();
  }
}

function mark(event, isOver) {
  event.preventDefault();
  byId("drop").classList.toggle("over", isOver);
}

/** Return the endpoint that the first line of a batch input names. Throws `Refused` if there is none. */
async function endpointOf(file) {
  if (!file.name.endsWith(".jsonl")) throw new Refused(400, "its name must end with .jsonl.");
  const [line] = (await file.slice(0, 2 ** 20).text()).split("\n", 1);
  try {
    const { url } = JSON.parse(line.replace(/^\ufeff/, ""));
    if (ENDPOINTS.includes(url)) return url;
  } catch {
    // a first line of over a megabyte, or no JSON: the server says what is wrong with it
    return ENDPOINTS[0];
  }
  throw new Refused(400, `the "url" of its first line must be one of ${ENDPOINTS.join(", ")}.`);
}

function exampleOf(model) {
  const lines = Array.from({ length: EXAMPLE_LINES }, (_, i) => ({
    custom_id: `sum-${i + 1}`,
    method: "POST",
    url: "/v1/chat/completions",
    body: { model, max_tokens: 60, messages: [{ role: "user", content: `How much is ${i + 3} + ${2 * i + 5}?` }] },
  }));
  return new File([lines.map((line) => JSON.stringify(line)).join("\n")], "example.jsonl");
}

/** One batch of the list. */
class Row {
  #bar = element("progress", { max: 1, value: 0 });
  #state = element("span", { class: "state" });
  #facts = element("span", { class: "facts" });
  #buttons = element("span", { class: "buttons" });

  constructor(batch, act) {
    const name = batch.metadata?.file?.trim() || batch.id;
    this.act = act;
    this.#bar.setAttribute("aria-label", `Progress of ${name}`);
    const head = element("p", { class: "row-head" }, element("b", { title: batch.id }, name), this.#state);
    const foot = element("p", { class: "row-foot" }, this.#facts, this.#buttons);
    this.root = element("li", { class: "part" }, head, this.#bar, foot);
  }

  show(batch) {
    const { total, completed, failed } = batch.request_counts;
    this.#bar.value = total ? (completed + failed) / total : 0;
    say(this.#state, batch.status.replace("_", " "));
    this.#state.dataset.state = { completed: "good", failed: "bad", expired: "bad" }[batch.status] ?? "";
    say(this.#facts, factsOf(batch));
    this.#offer(batch);
  }

  #offer(batch) {
    const offers = [
      [!ENDED.has(batch.status) && batch.status !== "cancelling", "Cancel", () => postJson(`v1/batches/${batch.id}/cancel`)],
      [batch.output_file_id, "Results", () => download(batch.output_file_id, `${batch.id}_output.jsonl`)],
      [batch.error_file_id, "Errors", () => download(batch.error_file_id, `${batch.id}_errors.jsonl`)],
    ].filter(([isOffered]) => isOffered);
    const labels = offers.map(([, label]) => label).join();
    if (this.#buttons.dataset.labels === labels) return;
    this.#buttons.dataset.labels = labels;
    const name = batch.metadata?.file?.trim() || batch.id;
    this.#buttons.replaceChildren(...offers.map(([, label, action]) => {
      const button = element("button", { type: "button", "aria-label": `${label} of ${name}` }, label);
      button.addEventListener("click", () => this.act(action));
      return button;
    }));
  }
}

function factsOf(batch) {
  const { total, completed, failed } = batch.request_counts;
  const [error] = batch.errors?.data ?? [];
  const leftS = ENDED.has(batch.status) ? null : secondsLeft(batch);
  const parts = [
    error && `${error.line ? `line ${error.line}: ` : ""}${error.message}`,
    total > 0 && `${count(completed)} of ${count(total)}`,
    failed > 0 && `${count(failed)} failed`,
    leftS !== null && `about ${duration(leftS)} left`,
    leftS !== null && Date.now() / 1000 + leftS > batch.expires_at && "its window is too short",
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Return the seconds until the end: as the server estimates it, else by the pace so far; null if nothing is known. */
function secondsLeft(batch) {
  const { estimate, progress } = batch.tidegate ?? {};
  if (progress?.eta_s) return progress.eta_s;
  if (estimate?.finish_at) return estimate.finish_at - Date.now() / 1000;
  const { total, completed, failed } = batch.request_counts;
  const done = completed + failed;
  if (!done || !batch.in_progress_at) return null;
  return ((Date.now() / 1000 - batch.in_progress_at) * (total - done)) / done;
}

async function download(fileId, name) {
  const url = URL.createObjectURL(await (await request(`v1/files/${fileId}/content`)).blob());
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
