// One streamed chat: its text, its times as this browser sees them, the tier that served it, and the rule that chose it.

import { Refused, events, postJson } from "./api.js";

/**
 * Send a chat and call `onText` with each piece of its answer.
 * Returns {firstMs, totalMs, tier, rule, usage, finish}; `firstMs` is null if no text came. If `signal` aborts the request,
 * `finish` is "stopped".
 */
export async function streamChat(body, { signal, onText = () => {} } = {}) {
  const began = performance.now();
  const answer = { firstMs: null, totalMs: 0, tier: null, rule: null, usage: null, finish: null };
  try {
    const wanted = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await postJson("v1/chat/completions", wanted, { signal, headers: { "x-tidegate-receipt": "1" } });
    for await (const { data } of events(response)) {
      if (data !== "[DONE]") take(JSON.parse(data), answer, began, onText);
    }
  } catch (error) {
    if (!signal?.aborted) throw error;
    answer.finish = "stopped";
  }
  answer.totalMs = performance.now() - began;
  return answer;
}

function take(chunk, answer, began, onText) {
  if (chunk.error) throw new Refused(chunk.error.code ?? 500, chunk.error.message);
  const [choice] = chunk.choices;
  const text = choice?.delta?.content || choice?.delta?.reasoning_content || "";
  if (text) {
    answer.firstMs ??= performance.now() - began;
    onText(text);
  }
  answer.tier = chunk.service_tier ?? answer.tier;
  answer.rule = chunk.tidegate?.rule ?? answer.rule;
  answer.usage = chunk.usage ?? answer.usage;
  answer.finish = choice?.finish_reason ?? answer.finish;
}
