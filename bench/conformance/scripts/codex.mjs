// Codex without a terminal, with a provider of its own: its tool loop over /v1/responses.
import { execFile } from "node:child_process";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";

import { runAll } from "./checks.mjs";

const codex = join(import.meta.dirname, "node_modules", ".bin", "codex");
const call = { name: "exec_command", arguments: { cmd: "echo tide-$((40 + 2))" } };
const home = await mkdtemp(join(tmpdir(), "codex-"));
const settings = `model = "${process.env.CONFORMANCE_MODEL}"
model_provider = "tidegate"
[model_providers.tidegate]
name = "Tidegate"
base_url = "${process.env.CONFORMANCE_BASE_URL}"
wire_api = "responses"
`;

async function run(prompt) {
  const flags = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", prompt];
  const options = { cwd: home, env: { PATH: process.env.PATH, HOME: home, CODEX_HOME: home }, timeout: 120_000 };
  const running = promisify(execFile)(codex, flags, options);
  running.child.stdin.end();
  return (await running).stdout.trim().split("\n").map(JSON.parse);
}

function assert(condition, what) {
  if (!condition) throw new Error(`assertion failed: ${what}`);
}

const checks = {
  "codex exec: a command is run, its output goes back, and the answer has it": async () => {
    const events = await run(`CALL ${JSON.stringify(call)} THEN 42`);
    const items = events.filter(({ type }) => type === "item.completed").map(({ item }) => item);
    const ran = items.find(({ type }) => type === "command_execution");
    assert(ran?.exit_code === 0 && ran.aggregated_output.includes("tide-42"), JSON.stringify(events));
    assert(items.at(-1).text?.includes("tide-42"), JSON.stringify(items.at(-1)));
    assert(events.at(-1).type === "turn.completed" && events.at(-1).usage.input_tokens > 0, JSON.stringify(events.at(-1)));
  },
};

await writeFile(join(home, "config.toml"), settings);
await runAll(checks);
