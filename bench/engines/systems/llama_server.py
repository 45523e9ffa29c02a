"""llama.cpp's server with the same GGUF file, in the Python interpreter of an environment with xllamacpp.

Of our modules, this one imports only `protocol`, so that the packages of that environment need not match ours.
"""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from bench.engines.systems.protocol import SystemSpec

START_S = 120.0


class LlamaServer:
    """The server in this process; all prompts of an order are sent to it at once."""

    def __init__(self, spec: SystemSpec) -> None:
        llama: Any = import_module("xllamacpp")
        params = llama.CommonParams()
        params.model.path = spec.gguf
        params.port = _free_port()
        params.n_parallel, params.n_ctx = spec.max_num_seqs, spec.max_num_seqs * spec.max_model_len
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.num_threads
        self._url = f"http://127.0.0.1:{params.port}"
        self._senders = ThreadPoolExecutor(spec.max_num_seqs)
        self._server = llama.Server(params)
        deadline = time.monotonic() + START_S
        while not self._is_up():
            if time.monotonic() > deadline:
                raise TimeoutError("llama.cpp's server does not answer")
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def settings(self) -> str:
        return "llama.cpp's server of xllamacpp, its defaults, prompts not cached"

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        return list(self._senders.map(self._complete, prompts, new_tokens))

    def _complete(self, prompt: Sequence[int], count: int) -> list[int]:
        body = {"prompt": list(prompt), "n_predict": count, "temperature": 0, "ignore_eos": True}
        body |= {"return_tokens": True, "cache_prompt": False}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def close(self) -> None:
        """End the process: the server's threads do not end by themselves."""
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
