"""The servers to measure, as context managers: `tidegate serve`, and vLLM in its own environment.

A server is started before the block and ended after it. Each server has its own process group, so that none of its
processes outlives the block. Knows command lines, ports and processes; does not know what is measured.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from bench.engines.system_client import vllm_environment
from loadtest.child_environment import ROOT, python_path
from loadtest.client.http import Target, TargetError, discover_model, get
from loadtest.machine import usable_cores
from loadtest.model_shapes import read_config, write_shape

START_TIMEOUT_S = 600.0  # vLLM compiles for more than a minute the first time
DEFAULT_KV_GIB = "2"  # vLLM's KV cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise
END_TIMEOUT_S = 45.0  # seconds that a server has to end after SIGTERM; then it gets SIGKILL
LOG_TAIL = 600  # characters of the log's end in an error message


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure. `pid` is its main process; None if the server was already running."""

    target: Target
    pid: int | None = None


def write_served_shape(directory: Path, name: str, max_position_embeddings: int) -> Path:
    """Write and return a model directory that any server can load with random weights.

    It holds the config of the shape `name`, and a tokenizer with a word for each token id. Raises `ShapeError` if there
    is no such shape.
    """
    write_shape(directory, name, max_position_embeddings)
    write_word_tokenizer(directory, read_config(directory)["vocab_size"])
    return directory


def with_tokenizer(model_dir: Path, folder: Path) -> Path:
    """Return a model directory that has a tokenizer.

    This is `model_dir` if it has a tokenizer, or else a directory in `folder` with a copy of its config and a word
    tokenizer. Raises `ShapeError` if the config cannot be read.
    """
    if (model_dir / "tokenizer.json").exists():
        return model_dir
    config, copy = read_config(model_dir), folder / model_dir.resolve().name
    copy.mkdir(parents=True)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_word_tokenizer(copy, config["vocab_size"])
    return copy


def write_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer in which every token id is a separate word.

    Random weights sample any id. A token without text would send no event to the client, so its time would be missing.
    """
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def context_of(model_dir: Path) -> int | None:
    """Return the context length in the model's config, in tokens; None if the config has none.

    Raises `ShapeError` if the config cannot be read.
    """
    length = read_config(model_dir).get("max_position_embeddings")
    return int(length) if length else None


def tidegate_command(
    model_dir: Path | None, load_format: str, data_dir: Path, num_threads: int | None, flags: Sequence[str]
) -> list[str]:
    """Return the command of `tidegate serve`.

    Without `model_dir`, the command serves the demo model. Without `num_threads`, the server chooses the number of
    threads.
    """
    command = [sys.executable, "-m", "tidegate", "serve", "--data-dir", str(data_dir), "--log-level", "warning"]
    if model_dir is not None:
        command += ["--model", str(model_dir), "--load-format", load_format]
    if num_threads:
        command += ["--threads", str(num_threads)]
    return [*command, *flags]


def vllm_command(interpreter: Path, model_dir: Path, load_format: str, flags: Sequence[str]) -> list[str]:
    command = [str(interpreter), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--load-format", load_format, "--host", "127.0.0.1", "--scheduling-policy", "priority"]
    return [*command, *flags]


def tidegate_environment() -> dict[str, str]:
    """Return this process's environment variables, changed to use the same source tree and no network.

    The other variables are unchanged, so that the server runs as if a user had started it.
    """
    return {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}


def serving_tidegate(
    model_dir: Path | None,
    load_format: str,
    folder: Path,
    num_threads: int,
    flags: Sequence[str],
    vllm_python: Path | None = None,
) -> AbstractAsyncContextManager[Server]:
    """Run `tidegate serve` until the block ends, with its data and its log in `folder`.

    With `num_threads` = 0, the server chooses the number of threads. With `vllm_python`, the server's engine is vLLM's
    executor, in the environment of this Python.
    """
    command = tidegate_command(model_dir, load_format, folder / "data", num_threads or None, flags)
    environment = tidegate_environment()
    if vllm_python is not None:
        command = [str(vllm_python), *command[1:], "--engine", "vllm"]
        environment = vllm_server_environment(num_threads) | {"PYTHONPATH": str(ROOT)}
    return serving(command, folder / "tidegate.log", "/ready", environment)


def engine_python(engine: str, vllm_python: Path | None) -> Path | None:
    """Return the Python of vLLM's environment if `engine` is vllm, otherwise None. Raises `TargetError`."""
    if engine == "vllm" and vllm_python is None:
        raise TargetError("--engine vllm needs --vllm-python, the Python of an environment with vLLM and Tidegate")
    return vllm_python if engine == "vllm" else None


def vllm_server_environment(num_threads: int) -> dict[str, str]:
    """Return the environment of a server that computes with vLLM; with `num_threads` = 0, on all usable cores."""
    return vllm_environment(
        num_threads or len(usable_cores()), os.environ.get("VLLM_CPU_KVCACHE_SPACE", DEFAULT_KV_GIB)
    )


@asynccontextmanager
async def serving(
    command: Sequence[str], log_file: Path, ready_path: str, environment: Mapping[str, str]
) -> AsyncIterator[Server]:
    """Run `command` with a free `--port` until the block ends.

    Yields the server once `ready_path` answers 200. Raises `TargetError` if the server ends or does not
    become ready.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        target = Target("127.0.0.1", port)
        await _wait_until_ready(process, target, ready_path, log_file)
        yield Server(replace(target, model=await discover_model(target)), process.pid)
    finally:
        await asyncio.to_thread(_end, process)


async def _wait_until_ready(process: subprocess.Popen[bytes], target: Target, ready_path: str, log_file: Path) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if process.poll() is not None:
                    raise TargetError(
                        f"the server ended with code {process.returncode}; its log ends: {_tail(log_file)}"
                    )
                with suppress(TargetError):
                    await get(target, ready_path, timeout_s=5.0)
                    return
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise TargetError(f"the server was not ready within {START_TIMEOUT_S:.0f} s: {_tail(log_file)}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the command, which ends its own child processes. Then kill what is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log_file: Path) -> str:
    return json.dumps(log_file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip(), ensure_ascii=False)
