"""The clients that are tried: their packages and their scripts.

Each client has an environment of its own, because clients pin each other's dependencies. To add a client, add a script
and a row. Knows package managers; does not know servers.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).parent / "scripts"
VLLM_ENVIRONMENT = Path(__file__).parents[2] / "tests" / "vllm_environment.sh"
INSTALL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    script: str
    packages: tuple[str, ...]  # of PyPI, or of npm if the script is a module of Node
    # The prompts of agents need a long context, and a model that calls tools: the scripted one.
    needs: Literal["chat", "agent", "vectors"] = "chat"
    environment: Path | None = None  # the script that makes the environment, called with a Python and the folder

    @property
    def runs_on_node(self) -> bool:
        return self.script.endswith(".mjs")

    def command(self, folder: Path) -> list[str]:
        """Return the command that runs the script in the environment in `folder`."""
        if self.runs_on_node:  # Node looks for packages and modules beside the script
            shutil.copy(SCRIPTS / "checks.mjs", folder)
            return ["node", str(shutil.copy(SCRIPTS / self.script, folder / self.script))]
        return [str(folder / "bin" / "python"), str(SCRIPTS / self.script)]


AI_SDK = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")
CLIENTS = (
    Client("openai", "openai_sdk.py", ("openai",)),
    Client("openai-vectors", "openai_vectors.py", ("openai",), needs="vectors"),
    Client("openai-tests", "openai_own_tests.py", ("openai[aiohttp]", "pytest", "pytest-asyncio", "rich")),
    Client("anthropic", "anthropic_sdk.py", ("anthropic",)),
    Client("claude-code", "claude_code.mjs", ("@anthropic-ai/claude-code",), needs="agent"),
    Client("codex", "codex.mjs", ("@openai/codex",), needs="agent"),
    Client("opencode", "opencode.mjs", ("opencode-ai",), needs="agent"),
    Client("open-responses", "open_responses.py", ("openresponses-types",)),
    Client("openai-agents", "openai_agents.py", ("openai-agents",)),
    Client("pydantic-ai", "pydantic_ai_client.py", ("pydantic-ai-slim[openai]",)),
    Client("langchain", "langchain_client.py", ("langchain", "langchain-openai")),
    Client("langchain-tests", "langchain_own_tests.py", ("langchain-tests", "langchain-openai")),
    Client("instructor", "instructor_client.py", ("instructor",)),
    Client("llama-index", "llama_index_client.py", ("llama-index-llms-openai-like",)),
    Client("litellm", "litellm_client.py", ("litellm[proxy]",)),
    Client("litellm-proxy", "litellm_proxy.py", ("litellm[proxy]",)),
    Client("lm-eval", "lm_eval_client.py", ("lm-eval[api,hf]",)),
    Client("guidellm", "guidellm_client.py", ("guidellm",)),
    Client("vllm-bench", "vllm_bench.py", ("vllm",), environment=VLLM_ENVIRONMENT),
    Client("node", "node_clients.mjs", ("openai", "@anthropic-ai/sdk", *AI_SDK)),
    Client("browser", "browser_page.mjs", ("openai", "playwright-core")),
)


class InstallError(Exception):
    """The packages of a client cannot be installed. The message is the end of the package manager's output."""


def install(client: Client, root: Path) -> Path:
    """Return the folder of the client's environment under `root`. It is made if it is missing or its packages changed.

    Raises `InstallError`.
    """
    folder = root / client.name
    mark = folder / "installed.txt"
    wanted = "\n".join(client.packages)
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in _install_commands(client, folder):
            _run(command, folder)
        mark.write_text(wanted)
    return folder


def versions(client: Client, folder: Path) -> str:
    """Return the installed versions of the client's packages, for people."""
    if client.runs_on_node:
        listed = _run(["npm", "ls", "--depth=0", "--parseable", "--long"], folder)
        names = [line.rsplit(":", 1)[-1] for line in listed.splitlines()[1:]]
        return ", ".join(names)
    listed = _run([str(folder / "bin" / "pip"), "list", "--format=freeze", "--disable-pip-version-check"], folder)
    wanted = {package.split("[")[0] for package in client.packages}
    lines = [line.split("==") for line in listed.splitlines()]
    return ", ".join(" ".join(line) for line in lines if line[0].replace("_", "-") in wanted)


def _install_commands(client: Client, folder: Path) -> list[Sequence[str]]:
    if client.environment is not None:
        return [[str(client.environment), sys.executable, str(folder)]]
    if client.runs_on_node:
        return [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]]
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", str(folder)], [*pip, *client.packages]]


def _run(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise InstallError(f"{command[0]} failed: {(error.stderr or error.stdout)[-500:].strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from None
    return done.stdout
