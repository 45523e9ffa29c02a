// k6 users for the tiers: chats of the realtime tier, and bulk requests without pauses.
//
//   k6 run -e BASE_URL=http://127.0.0.1:8000 -e USERS=50 -e BULK_USERS=16 -e DURATION=60s loadtest/k6.js
//
// Every prompt holds a nonce, and an answer that is not this nonce counts as a failed check. Against another model than
// the demo model, which was trained to repeat nonces, add -e CHECK_NONCE=no. The API key is read from TIDEGATE_API_KEY or
// OPENAI_API_KEY.
//
// k6 reads a stream as a whole, so it knows no gaps between tokens. `first_bytes` is the time until the answer begins;
// Tidegate begins a stream with its first token. `tidegate loadtest run` measures tokens one by one.

import { check, sleep } from "k6";
import exec from "k6/execution";
import http from "k6/http";
import { Counter, Trend } from "k6/metrics";

const root = (__ENV.BASE_URL || "http://127.0.0.1:8000").replace(/\/+$/, "").replace(/\/v1$/, "");
const key = __ENV.TIDEGATE_API_KEY || __ENV.OPENAI_API_KEY;
const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
const checksNonce = __ENV.CHECK_NONCE !== "no";
const MAX_NONCE_TOKENS = 48; // enough to repeat a nonce with any tokenizer
const LETTERS = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789";

const firstBytes = new Trend("first_bytes", true);
const outputTokens = new Counter("output_tokens");

function users(name, count) {
  return count > 0 ? { [name]: { executor: "constant-vus", exec: name, vus: count, duration: __ENV.DURATION || "60s" } } : {};
}

export const options = {
  scenarios: { ...users("realtime", Number(__ENV.USERS || 50)), ...users("bulk", Number(__ENV.BULK_USERS || 0)) },
  thresholds: {
    checks: ["rate>0.99"],
    // A threshold makes k6 show the figures of one tier alone.
    "http_req_duration{scenario:realtime}": [],
    "http_req_duration{scenario:bulk}": [],
    "first_bytes{scenario:realtime}": [],
  },
};

export function setup() {
  const response = http.get(`${root}/v1/models`, { headers });
  if (response.status !== 200) {
    exec.test.abort(`${root}/v1/models: HTTP ${response.status} ${response.error}`);
  }
  return { model: __ENV.MODEL || response.json("data.0.id") };
}

export function realtime({ model }) {
  const nonce = newNonce();
  const response = ask(model, nonce, { service_tier: "default", stream: true, stream_options: { include_usage: true } });
  firstBytes.add(response.timings.waiting);
  judge(response, nonce, response.status === 200 ? readStream(response.body) : null);
  sleep(0.5 + Math.random());
}

export function bulk({ model }) {
  const nonce = newNonce();
  const response = ask(model, nonce, { service_tier: "flex" });
  const body = response.status === 200 ? response.json() : null;
  judge(response, nonce, body && { text: body.choices[0].message.content, usage: body.usage });
  if (response.status !== 200) {
    sleep(Number(response.headers["Retry-After"] || 1));
  }
}

function ask(model, nonce, fields) {
  const messages = [{ role: "user", content: `Repeat: ${nonce}` }];
  const body = { model, messages, max_tokens: MAX_NONCE_TOKENS, temperature: 0, ...fields };
  return http.post(`${root}/v1/chat/completions`, JSON.stringify(body), { headers, timeout: "600s" });
}

// Return the text and the usage of a stream; null if it ends early or with an error.
function readStream(body) {
  const lines = body.split("\n").filter((line) => line.startsWith("data:"));
  const payloads = lines.map((line) => line.slice(5).trim());
  if (payloads.pop() !== "[DONE]") {
    return null;
  }
  let text = "";
  let usage = null;
  for (const event of payloads.map((payload) => JSON.parse(payload))) {
    if (event.error) {
      return null;
    }
    text += event.choices.map((choice) => choice.delta.content || "").join("");
    usage = event.usage || usage;
  }
  return { text, usage };
}

function judge(response, nonce, answer) {
  check(response, { "HTTP 200": ({ status }) => status === 200 });
  if (response.status !== 200) {
    return;
  }
  check(answer, { "the answer is whole": (found) => found !== null });
  if (checksNonce) {
    check(answer, { "the answer is its nonce": (found) => found !== null && found.text.trim() === nonce });
  }
  outputTokens.add(answer && answer.usage ? answer.usage.completion_tokens : 0);
}

// Return a nonce such as k7Qz-09ab. No character comes twice, since the demo model gets some others wrong.
function newNonce() {
  const drawn = new Set();
  while (drawn.size < 8) {
    drawn.add(LETTERS[Math.floor(Math.random() * LETTERS.length)]);
  }
  const letters = [...drawn].join("");
  return `${letters.slice(0, 4)}-${letters.slice(4)}`;
}
