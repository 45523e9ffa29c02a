// A web page of another origin in a real browser: plain fetch, and the official client as a browser loads it.
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { join, normalize } from "node:path";
import { chromium } from "playwright-core";

const baseURL = process.env.CONFORMANCE_BASE_URL;
const model = process.env.CONFORMANCE_MODEL;
const candidates = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const types = { html: "text/html", mjs: "text/javascript", js: "text/javascript" };

function assert(condition, what) {
  if (!condition) throw new Error(`assertion failed: ${what}`);
}

// The origin of the page: another port is another origin. It also serves the client's modules.
const origin = createServer(async (request, response) => {
  const path = request.url === "/" ? "" : join(import.meta.dirname, "node_modules", normalize(request.url));
  try {
    const body = path ? await readFile(path) : "<!doctype html><title>A page of another origin</title>";
    response.setHeader("content-type", types[(path || "html").split(".").pop()] ?? "application/octet-stream");
    response.end(body);
  } catch {
    response.writeHead(404).end();
  }
});

const streamsByFetch = async ({ baseURL, model }) => {
  const messages = [{ role: "user", content: "Count from 1 to 50" }];
  const body = JSON.stringify({ model, messages, stream: true, max_tokens: 100 });
  const headers = { "content-type": "application/json", authorization: "Bearer conformance", "x-of-the-page": "1" };
  const response = await fetch(`${baseURL}/chat/completions`, { method: "POST", headers, body });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let reads = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read(), reads++) text += part.value;
  return { status: response.status, id: response.headers.get("x-request-id"), text, reads };
};

const asksTwice = async ({ baseURL, model }) => {
  const { default: OpenAI } = await import("/openai/index.mjs");
  const client = new OpenAI({ baseURL, apiKey: "conformance", dangerouslyAllowBrowser: true, maxRetries: 0 });
  const messages = [{ role: "user", content: "How much is 17 + 25?" }];
  const ask = async (options) => {
    let text = "";
    let tier = "";
    const answer = await client.chat.completions.create({ model, messages, temperature: 0, stream: true, ...options });
    for await (const chunk of answer) {
      text += chunk.choices[0]?.delta?.content ?? "";
      tier = chunk.service_tier;
    }
    messages.push({ role: "assistant", content: text }, { role: "user", content: "And what is your name?" });
    return { text, tier };
  };
  return [await ask({}), await ask({ service_tier: "flex" })];
};

const stops = async ({ baseURL, model }) => {
  const { default: OpenAI } = await import("/openai/index.mjs");
  const client = new OpenAI({ baseURL, apiKey: "conformance", dangerouslyAllowBrowser: true, maxRetries: 0 });
  const answer = await client.completions.create({ model, prompt: "1", stream: true, max_tokens: 1000, ignore_eos: true });
  for await (const chunk of answer) {
    answer.controller.abort();
    return Boolean(chunk.id);
  }
};

const refused = async ({ baseURL }) => {
  const body = JSON.stringify({ model: "none", messages: [{ role: "user", content: "Hello!" }] });
  const headers = { "content-type": "application/json" };
  const response = await fetch(`${baseURL}/chat/completions`, { method: "POST", headers, body });
  return { status: response.status, message: (await response.json()).error.message };
};

async function disconnects() {
  const text = await (await fetch(new URL("/metrics", baseURL))).text();
  const lines = text.split("\n").filter((line) => line.startsWith("tidegate_client_disconnects_total{"));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").pop()), 0);
}

async function rises(read, before) {
  for (const end = Date.now() + 15_000; Date.now() < end; await new Promise((resolve) => setTimeout(resolve, 200)))
    if ((await read()) > before) return true;
  return false;
}

const server = { baseURL, model };
const checks = {
  "fetch of a page of another origin reads a stream in parts, and the request's id": async (page) => {
    const { status, id, text, reads } = await page.evaluate(streamsByFetch, server);
    assert(status === 200 && id?.startsWith("req_") && text.includes("[DONE]"), `${status} ${id}`);
    assert(reads > 1, `the stream came in ${reads} part`);
  },
  "the official client in the browser: a stream, a second turn, another tier": async (page) => {
    const [first, second] = await page.evaluate(asksTwice, server);
    assert(first.text && second.text && second.tier === "flex", JSON.stringify([first, second]));
  },
  "stop in the browser ends the generation on the server": async (page) => {
    const before = await disconnects();
    assert(await page.evaluate(stops, server), "no chunk came");
    assert(await rises(disconnects, before), "no disconnect was counted");
  },
  "a page can read why it is refused": async (page) => {
    const { status, message } = await page.evaluate(refused, server);
    assert(status === 404 && message.includes("none"), `${status} ${message}`);
  },
};

await new Promise((resolve) => origin.listen(0, "127.0.0.1", resolve));
const browser = await chromium.launch({ executablePath: candidates.find((path) => path && existsSync(path)), args: ["--no-sandbox"] });
for (const [check, run] of Object.entries(checks)) {
  const page = await browser.newPage();
  let error = "";
  try {
    await page.goto(`http://127.0.0.1:${origin.address().port}/`);
    await run(page);
  } catch (exception) {
    error = `${exception.name}: ${exception.message}`.slice(0, 500);
  }
  console.log(JSON.stringify({ check, error }));
  await page.close();
}
await browser.close();
origin.close();
