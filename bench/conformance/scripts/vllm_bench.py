"""`vllm bench serve` with its random prompts, over each endpoint for texts that it knows.

It counts the prompts' tokens with the demo model's tokenizer.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import BASE_URL, check, main

VLLM = Path(sys.executable).parent / "vllm"
TOKENIZER = Path(__file__).parents[3] / "demo_model" / "weights"
REQUESTS = 6
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


def measure(*more: str) -> dict[str, Any]:
    """Return the results of a benchmark. `more` are flags; without them the backend is vllm's default."""
    flags = {
        "--base-url": BASE_URL.removesuffix("/v1"),
        "--tokenizer": str(TOKENIZER),
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(OUTPUT_TOKENS),
        "--num-prompts": str(REQUESTS),
        "--result-filename": "results.json",
    }
    command = [str(VLLM), "bench", "serve", *(part for flag in flags.items() for part in flag), *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--save-result", "--save-detailed", "--disable-tqdm"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr[-300:]
        found: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
        return found


def assert_all_succeed(*more: str) -> None:
    found = measure(*more)
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
    assert found["output_lens"] == [OUTPUT_TOKENS] * REQUESTS, found["output_lens"]
    assert all(tokens >= PROMPT_TOKENS for tokens in found["input_lens"]), found["input_lens"]
    assert all(found["generated_texts"]), found["generated_texts"]
    times = list(zip(found["ttfts"], found["latencies"], strict=True))
    assert all(0 < first < whole for first, whole in times), times


@check
def completions() -> None:
    """completions, all at once: each succeeds, with the tokens that were asked for"""
    assert_all_succeed()


@check
def chats() -> None:
    """the same over /v1/chat/completions"""
    assert_all_succeed("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")


@check
def responses() -> None:
    """the same over /v1/responses"""
    assert_all_succeed("--backend", "openai-responses", "--endpoint", "/v1/responses")


main()
