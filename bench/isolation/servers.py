"""The servers to measure: `tidegate serve`, and vLLM in its own environment, with the flags that choose them.

Knows command lines and model directories; `loadtest.serving` starts and ends the processes.
"""

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from bench.engines.systems.client import vllm_environment
from loadtest.client.http import TargetError
from loadtest.machine import ROOT, usable_cores
from loadtest.model_shapes import read_config, write_shape
from loadtest.running import print_progress, running_server
from loadtest.serving import Server, serving, tidegate_command, tidegate_environment

Served = tuple[Path, str]  # a model directory, and the format from which its weights are loaded

DEFAULT_KV_GIB = "2"  # vLLM's KV cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise


class ServerFlags(BaseModel):
    """The flags of a command that measures our server beside another one. Each is started, or runs already."""

    url: str = Field("", description="A running Tidegate; empty: one is started.")
    server_flags: str = Field("", description="More flags for `tidegate serve`, in one string.")
    peer_url: str = Field("", description="To compare with: a running server with the same model.")
    vllm_python: Path | None = Field(None, description="The Python of an environment with vLLM, to be started.")
    engine: Literal["native", "vllm"] = Field(
        "native", description="Engine of our server; vllm: vLLM's executor, in the environment of --vllm-python."
    )
    vllm_flags: str = Field("", description="More flags for vLLM's server, in one string.")
    settle: float = Field(1.0, ge=0, le=60, description="Seconds of rest before each part.")
    allow_remote: bool = Field(False, description="Accept a URL that is not this machine.")

    async def start_ours(
        self, stack: AsyncExitStack, folder: Path, served: Served | None, num_threads: int, *flags: str
    ) -> Server:
        """Return our server, which runs until `stack` ends. `served` is None for the demo model."""
        if self.url:
            return Server(await running_server(self.url, self.allow_remote))
        print_progress("starting tidegate serve")
        vllm_python = engine_python(self.engine, self.vllm_python)
        model_dir, load_format = served or (None, "auto")
        every_flag = [*flags, *shlex.split(self.server_flags)]
        ours = serving_tidegate(model_dir, load_format, folder, num_threads, every_flag, vllm_python)
        return await stack.enter_async_context(ours)

    async def start_peer(
        self, stack: AsyncExitStack, folder: Path, served: Served | None, num_threads: int, *flags: str
    ) -> Server | None:
        """Return the server to compare with, which runs until `stack` ends; None if the flags name none."""
        if self.peer_url:
            return Server(await running_server(self.peer_url, self.allow_remote))
        if self.vllm_python is None:
            return None
        if served is None:
            raise TargetError("vLLM needs a model directory: --model or --shape")
        print_progress("starting vLLM; it may compile for minutes")
        command = vllm_command(self.vllm_python, *served, [*flags, *shlex.split(self.vllm_flags)])
        environment = vllm_server_environment(num_threads)
        return await stack.enter_async_context(serving(command, folder / "vllm.log", "/health", environment))


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


def vllm_command(interpreter: Path, model_dir: Path, load_format: str, flags: Sequence[str]) -> list[str]:
    command = [str(interpreter), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--load-format", load_format, "--host", "127.0.0.1", "--scheduling-policy", "priority"]
    return [*command, *flags]


def serving_tidegate(
    model_dir: Path | None,
    load_format: str,
    folder: Path,
    num_threads: int,
    flags: Sequence[str],
    vllm_python: Path | None = None,
    api_key: str = "",
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
    return serving(command, folder / "tidegate.log", "/ready", environment, api_key)


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
