// Requests to this server with the user's API key, its errors, and server-sent events.

const KEY = "tidegate.key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An answer that is no success. Its message is the server's own sentence. */
export class Refused extends Error {
  constructor(status, message, retryAfterMs = null) {
    super(message);
    this.status = status;
    this.retryAfterMs = retryAfterMs;
  }
}

function headersOf(options, key) {
  const headers = new Headers(options.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  if (typeof options.body === "string") headers.set("content-type", "application/json");
  return headers;
}

async function refusalOf(response, key) {
  const wait = Number(response.headers.get("retry-after-ms")) || null;
  const body = await response.json().catch(() => null);
  if (response.status === 401) window.dispatchEvent(new CustomEvent("key-needed", { detail: key }));
  return new Refused(response.status, body?.error?.message ?? `The server answered ${response.status}.`, wait);
}

let shown = ""; // a name of the model whose tiers and workers are shown; empty: the main model

/** Show this model from now on. Return whether another one was shown before. */
export function showModel(name) {
  const isOther = name !== shown;
  shown = name;
  return isOther;
}

/** Return the path of a report of /admin on the shown model. */
export const ofModel = (path) => (shown ? `${path}?model=${encodeURIComponent(shown)}` : path);

/** Return the response. Throws `Refused` if it is no success. */
export async function request(path, options = {}) {
  const key = apiKey.get();
  const response = await fetch(path, { cache: "no-store", ...options, headers: headersOf(options, key) });
  if (!response.ok) throw await refusalOf(response, key);
  return response;
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const postJson = (path, body, options = {}) =>
  request(path, { method: "POST", body: body === undefined ? undefined : JSON.stringify(body), ...options });

/** Yield {event, data} for each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const blocks = (rest + part.value.replaceAll("\r", "")).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = fieldsOf(block);
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the response may have been aborted
  }
}

function fieldsOf(block) {
  const found = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) found.event = line.slice(6).trim();
    if (line.startsWith("data:")) found.data += line.slice(5).trim();
  }
  return found;
}

/** Return a sentence about an error, for the user. */
export function sentenceOf(error) {
  if (error instanceof Refused && error.status === 401) return "The server wants an API key. Enter one with the button “API key”.";
  if (error instanceof Refused) return error.message;
  return "The server cannot be reached.";
}
