// Claude Code without a terminal: its tool loop, its stream of messages, and what it says of an unknown model.
import { execFile } from "node:child_process";
import { mkdtemp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";

import { runAll } from "./checks.mjs";

const claude = join(import.meta.dirname, "node_modules", ".bin", "claude");
const call = { name: "Bash", arguments: { command: "echo tide-$((40 + 2))", description: "Add" } };
const prompt = `CALL ${JSON.stringify(call)} THEN 42`;
const home = await mkdtemp(join(tmpdir(), "claude-"));
const env = {
  PATH: process.env.PATH,
  HOME: home, // no settings and no keys of the user's
  ANTHROPIC_BASE_URL: process.env.CONFORMANCE_BASE_URL.replace(/\/v1$/, ""),
  ANTHROPIC_AUTH_TOKEN: "conformance",
  ANTHROPIC_MODEL: process.env.CONFORMANCE_MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

async function run(args, more = {}) {
  const options = { cwd: home, env: { ...env, ...more }, timeout: 120_000 };
  const running = promisify(execFile)(claude, args, options);
  running.child.stdin.end();
  return (await running).stdout;
}

function assert(condition, what) {
  if (!condition) throw new Error(`assertion failed: ${what}`);
}

const checks = {
  "claude -p: a tool is called, its result goes back, and the answer has it": async () => {
    const result = JSON.parse(await run(["-p", prompt, "--allowedTools", "Bash", "--output-format", "json"]));
    assert(result.result.includes("tide-42") && result.num_turns === 2, JSON.stringify(result));
    assert(result.usage.input_tokens > 0 && result.usage.output_tokens > 0, JSON.stringify(result.usage));
  },
  "claude -p: the messages of a run are streamed": async () => {
    const format = ["--output-format", "stream-json", "--verbose", "--include-partial-messages"];
    const lines = (await run(["-p", prompt, "--allowedTools", "Bash", ...format])).trim().split("\n").map(JSON.parse);
    const events = lines.filter(({ type }) => type === "stream_event").map(({ event }) => event.delta?.type);
    assert(events.includes("input_json_delta") && events.includes("text_delta"), events.join());
  },
  "claude -p: a model that is not served is named": async () => {
    const failed = await run(["-p", "hi"], { ANTHROPIC_MODEL: "claude-none" }).catch((error) => error);
    assert(`${failed.stdout}${failed.stderr}`.includes("claude-none"), failed.stdout);
  },
};

await runAll(checks);
