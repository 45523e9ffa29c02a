// The console: connects its parts to the live feed and to the user's API key.

import { Refused, apiKey, getJson, ofModel, postJson, sentenceOf, showModel } from "./api.js";
import { Batches } from "./batches.js";
import { FirstTokenChart, ShareChart, colorsOf, showLegend } from "./charts.js";
import { Chat } from "./chat.js";
import { Decisions } from "./decisions.js";
import { Engine } from "./engine.js";
import { Feed } from "./feed.js";
import { byId, percent, say, seconds } from "./format.js";
import { History } from "./history.js";
import { Load, probeLegend } from "./load.js";
import { TierCards, summaryOf, tiersOf } from "./tiers.js";
import { Waves } from "./waves.js";

const MODELS_RETRY_MS = 3000;

const history = new History();
const shareChart = new ShareChart();
const firstTokenChart = new FirstTokenChart(history.loads);
const cards = new TierCards();
const decisions = new Decisions();
const model = () => byId("chat-model").value;
const chat = new Chat();
const load = new Load(history);
const waves = new Waves();
const batches = new Batches(model);
const engine = new Engine((ready) => (missing = ready ? ready.missing : ["gateway"]));
let tiers = [];
let missing = []; // what GET /ready says is missing
let tierNames = ""; // those of the last event
let isPaused = false;
let models = []; // of GET /v1/models

// -- status ------------------------------------------------------------------------------------------------------------

function showStatus(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  say(status, text);
}

/** Show or hide what only administrators may see. `message` says why it is hidden. */
function setAdmin(isAdmin, message = "") {
  document.body.dataset.admin = isAdmin ? "yes" : "no";
  byId("admin-note").hidden = isAdmin;
  say(byId("admin-note"), message);
  if (!isAdmin) engine.take([]);
}

// -- the live feed -----------------------------------------------------------------------------------------------------

function showTiers(found) {
  if (JSON.stringify(found) === JSON.stringify(tiers)) return;
  tiers = found;
  shareChart.setTiers(tiers, history.loads);
  firstTokenChart.setSlo(tiers.find((tier) => tier.ttftSloS)?.ttftSloS ?? null);
  cards.setTiers(tiers);
  chat.setTiers(tiers);
  load.setTiers(tiers);
  waves.setTiers(tiers);
}

async function readTiers() {
  try {
    showTiers(tiersOf((await getJson(ofModel("admin/tiers"))).document));
  } catch {
    // the feed, which needs the same rights, says what is wrong
  }
}

function show(event) {
  const state = { ...event, workers: event.workers.filter((worker) => worker.tiers) }; // a new one has no report yet
  const now = Date.now() / 1000;
  const watched = tiers.find((tier) => tier.ttftSloS);
  history.addReports(state.workers, now);
  const summary = watched && summaryOf(watched.name, state);
  if (summary?.ttftS) history.addP99(now, summary.ttftS);
  decisions.add(state.workers);
  const names = Object.keys(state.waiting).join();
  if (names !== tierNames) readTiers(); // the tiers have changed
  tierNames = names;
  if (isPaused) return;
  engine.take(state.workers);
  const shares = history.now();
  cards.show(state, shares);
  draw(shares, summary);
  const without = missing.length || event.workers.length ? missing : ["worker"]; // GET /ready is of all models
  if (without.length) showStatus("bad", `no ${without.join(", no ")}`);
  else showStatus("good", "live");
}

function draw(shares, summary) {
  shareChart.draw(history.shares.list);
  const colors = colorsOf(tiers);
  const entries = tiers.map(({ name }) => ({ label: name, text: percent(shares.get(name)), color: colors.get(name) }));
  const used = tiers.reduce((sum, { name }) => sum + (shares.get(name) ?? 0), 0);
  const idle = shares.size ? Math.max(0, 1 - used) : null;
  showLegend(byId("share-legend"), [...entries, { label: "idle, overhead", text: percent(idle), color: "--line" }]);
  drawFirstTokens(summary);
}

function drawFirstTokens(summary) {
  firstTokenChart.draw(history.firsts.list);
  const watched = tiers.find((tier) => tier.ttftSloS);
  const promised = watched
    ? [
        { label: `SLO of ${watched.name}`, text: seconds(watched.ttftSloS), color: "--bad", kind: "dashes" },
        { label: "p99 at the server, 30 s", text: seconds(summary?.ttftS), color: "--i1", kind: "line" },
      ]
    : [];
  showLegend(byId("ttft-legend"), [...promised, ...probeLegend(history)]);
}

const feed = new Feed({
  begin() {
    setAdmin(true);
    decisions.clear();
    history.addGap(Date.now() / 1000);
    tierNames = "";
    engine.refresh();
  },
  state: show,
  store: (message) => showStatus("bad", message),
  lost(error) {
    if (!(error instanceof Refused)) return showStatus("bad", "connection lost, trying again …");
    if (error.status === 401) return (showStatus("wait", "API key needed"), setAdmin(false, sentenceOf(error)));
    showStatus("wait", error.status === 403 ? "no admin rights" : "no live numbers");
    setAdmin(false, `No live numbers: ${error.message} The playground and batches work without them.`);
  },
});

// -- the API key -------------------------------------------------------------------------------------------------------

function askForKey(reason) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  if (reason) say(byId("key-reason"), reason);
  byId("key").value = apiKey.get();
  dialog.showModal();
}

function useKey(value) {
  apiKey.set(value.trim());
  byId("key-dialog").close();
  feed.restart();
  readModels();
  batches.refresh();
}

byId("key-button").addEventListener("click", () => askForKey(""));
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-forget").addEventListener("click", () => useKey(""));
byId("key-form").addEventListener("submit", (event) => (event.preventDefault(), useKey(byId("key").value)));
window.addEventListener("key-needed", ({ detail: refused }) => {
  const wrong = "The server does not accept this key. Enter another one.";
  const none = "This server asks for an API key. It stays in this tab until you close it.";
  if (refused !== apiKey.get() || refused === lastAsked) return; // another key has been entered since, or it was asked
  askForKey(refused ? wrong : none);
  lastAsked = refused;
});
let lastAsked = null; // the key for which the dialog was opened, so that it opens once for each

// -- signing in --------------------------------------------------------------------------------------------------------

async function showSession() {
  const session = await getJson("console/session").catch(() => ({ sign_in: false, user: null }));
  for (const link of document.querySelectorAll(".sign-in")) {
    link.href = "console/sign-in";
    link.hidden = !session.sign_in || session.user !== null;
  }
  byId("sign-out").hidden = session.user === null;
  byId("sign-out").title = session.user === null ? "" : `${session.user}: ${session.role}`;
}

byId("sign-out").addEventListener("click", async () => {
  await postJson("console/sign-out").catch(() => null);
  location.reload();
});

// -- the start ---------------------------------------------------------------------------------------------------------

/** Ask the chosen model from now on, and show its tiers and workers. */
function useModel() {
  const chosen = models.find(({ id }) => id === model());
  chat.setModel(chosen);
  load.setModel(chosen);
  waves.setModel(chosen);
  byId("load").disabled = byId("waves").disabled = !chosen?.capabilities.completion;
  say(byId("model"), chosen?.id ?? "");
  const isOther = showModel(chosen && chosen !== models[0] ? chosen.id : "");
  if (!isOther) return;
  history.clear();
  feed.restart();
}

async function readModels() {
  try {
    models = (await getJson("v1/models")).data;
    chat.setModels(models);
    useModel();
  } catch (error) {
    if (!(error instanceof Refused)) setTimeout(readModels, MODELS_RETRY_MS);
  }
}

byId("chat-model").addEventListener("change", useModel);
byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.target.setAttribute("aria-pressed", String(isPaused));
  if (isPaused) showStatus("wait", "paused");
});

setInterval(() => document.body.dataset.admin === "no" && !isPaused && drawFirstTokens(null), 1000);
decisions.clear();
showSession();
readModels();
feed.run();
engine.run();
batches.run();
