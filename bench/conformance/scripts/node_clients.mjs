// The official Node clients of OpenAI and Anthropic, and the AI SDK over each API; by default it calls /v1/responses.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

import { runAll } from "./checks.mjs";

const baseURL = process.env.CONFORMANCE_BASE_URL;
const model = process.env.CONFORMANCE_MODEL;
const apiKey = "conformance"; // the server asks for none, but clients want one
const client = new OpenAI({ baseURL, apiKey });
const anthropic = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey });
const messages = [{ role: "user", content: "Hello!" }];
const schema = z.object({ name: z.enum(["Paris", "Oslo"]) });
const models = [
  createOpenAI({ baseURL, apiKey })(model),
  createOpenAI({ baseURL, apiKey }).chat(model),
  createAnthropic({ baseURL, apiKey })(model),
  createOpenAICompatible({ name: "tidegate", baseURL, apiKey, supportsStructuredOutputs: true })(model),
];

function assert(condition, what) {
  if (!condition) throw new Error(`assertion failed: ${what}`);
}

const checks = {
  "Node client: chat and its stream": async () => {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    assert(text && text === answer.choices[0].message.content, text);
  },
  "Node client: a response and its stream": async () => {
    const answer = await client.responses.create({ model, input: "Hello!", temperature: 0 });
    const last = await client.responses.stream({ model, input: "Hello!", temperature: 0 }).finalResponse();
    assert(answer.output_text && answer.output_text === last.output_text, last.output_text);
  },
  "Anthropic's Node client: a message, its stream, and the models": async () => {
    const asked = { model, max_tokens: 64, messages };
    const answer = await anthropic.messages.create({ ...asked, temperature: 0 });
    const text = await anthropic.messages.stream({ ...asked, temperature: 0 }).finalText();
    assert(text && text === answer.content[0].text, text);
    assert((await anthropic.models.list()).data.some(({ id }) => id === model), "models");
  },
  "AI SDK: generateText, over responses, chat, messages and a compatible server": async () => {
    for (const each of models) assert((await generateText({ model: each, prompt: "Hello!" })).text, "text");
  },
  "AI SDK: streamText": async () => {
    for (const each of models) {
      let text = "";
      for await (const part of streamText({ model: each, prompt: "Hello!" }).textStream) text += part;
      assert(text, "text");
    }
  },
  "AI SDK: generateObject": async () => {
    for (const each of models) {
      const { object } = await generateObject({ model: each, schema, prompt: "Which city?" });
      assert(typeof object.name === "string", JSON.stringify(object));
    }
  },
  "AI SDK: a tool, called by the model, and its result": async () => {
    for (const each of models) {
      const cities = [];
      const getWeather = tool({
        description: "Get the weather of a city",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => (cities.push(city), "sunny, 21 degrees"),
      });
      const { text } = await generateText({
        model: each,
        temperature: 0,
        tools: { get_weather: getWeather },
        stopWhen: stepCountIs(3),
        prompt: "What is the weather in Paris?",
      });
      assert(cities[0] === "Paris" && text, `${cities} ${text}`);
    }
  },
};

await runAll(checks);
