// opencode without a terminal, with a provider of its own: its tool loop over chat completions.
import { execFile } from "node:child_process";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";

import { runAll } from "./checks.mjs";

const opencode = join(import.meta.dirname, "node_modules", ".bin", "opencode");
const model = process.env.CONFORMANCE_MODEL;
const call = { name: "bash", arguments: { command: "echo tide-$((40 + 2))", description: "Add" } };
const prompt = `CALL ${JSON.stringify(call)} THEN 42`;
const home = await mkdtemp(join(tmpdir(), "opencode-"));
const provider = {
  npm: "@ai-sdk/openai-compatible",
  name: "Tidegate",
  options: { baseURL: process.env.CONFORMANCE_BASE_URL },
  models: { [model]: { name: model }, "tidegate-none": { name: "a model that is not served" } },
};

async function run(ofModel) {
  // It quotes an argument with spaces, and with them the call; words that come one by one are joined.
  const flags = ["run", "--format", "json", "--model", `tidegate/${ofModel}`, ...prompt.split(" ")];
  const options = { cwd: home, env: { PATH: process.env.PATH, HOME: home }, timeout: 120_000 };
  const running = promisify(execFile)(opencode, flags, options);
  running.child.stdin.end();
  return (await running.catch((error) => error)).stdout.trim().split("\n").map(JSON.parse);
}

function assert(condition, what) {
  if (!condition) throw new Error(`assertion failed: ${what}`);
}

const checks = {
  "opencode run: a tool is called, its result goes back, and the answer has it": async () => {
    const events = await run(model);
    const parts = (kind) => events.filter(({ type }) => type === kind).map(({ part }) => part);
    const [used] = parts("tool_use");
    assert(used?.tool === "bash" && used.state.status === "completed", JSON.stringify(events));
    assert(used.state.output.includes("tide-42"), JSON.stringify(used));
    assert(parts("text").at(-1)?.text.includes("tide-42"), JSON.stringify(events));
    const steps = parts("step_finish");
    assert(steps.map(({ reason }) => reason).join() === "tool-calls,stop", JSON.stringify(steps));
    assert(steps.every(({ tokens }) => tokens.input > 0 && tokens.output > 0), JSON.stringify(steps));
  },
  "opencode run: a model that is not served is named": async () => {
    const { error } = (await run("tidegate-none")).find(({ type }) => type === "error") ?? {};
    assert(error?.data.statusCode === 404 && error.data.message.includes("tidegate-none"), JSON.stringify(error));
  },
};

await writeFile(join(home, "opencode.json"), JSON.stringify({ provider: { tidegate: provider } }));
await runAll(checks);
