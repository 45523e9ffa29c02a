// The traffic that the page makes: requests with many answers, since a browser opens only six connections to a server.

import { Refused, postJson } from "./api.js";

export const MAX_LOAD_MS = 180_000; // after so long, each kind of traffic ends by itself
const MAX_TOKENS = 1000; // of an answer; at most half of the model's context
const RETRY_MS = { usual: 2000, most: 30_000 };

/** Wait for a time, or until `signal` aborts. */
export const pause = (milliseconds, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/** Return the body of a request for `n` long answers of a model of GET /v1/models. */
export function askFor(model, n) {
  const maxTokens = Math.min(MAX_TOKENS, Math.floor((model.max_model_len ?? 2 * MAX_TOKENS) / 2));
  const messages = [{ role: "user", content: "Count from 1 to 200" }];
  return { model: model.id, messages, n, max_tokens: maxTokens, temperature: 1 };
}

/** Send a request again and again, until `signal` aborts. Waits where the server is full; throws after other errors. */
export async function repeat(body, signal) {
  while (!signal.aborted) {
    try {
      await (await postJson("v1/chat/completions", body, { signal })).arrayBuffer();
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Refused) || ![429, 503].includes(error.status)) throw error;
      await pause(Math.min(error.retryAfterMs ?? RETRY_MS.usual, RETRY_MS.most), signal);
    }
  }
}
