"""The size of a batch's input, counted without a tokenizer."""

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.jobs.batches.input.jsonl import MAX_LINE_BYTES
from gateway.jobs.batches.input.offload import offload
from gateway.jobs.batches.input.order import BLOCK_BYTES
from gateway.jobs.batches.input.scan import input_size
from gateway.jobs.batches.input.size import COMPARED_BLOCKS, InputSize, line_size
from gateway.protocol.json_body import INLINE_CONTAINERS, INLINE_SIZE, MAX_CONTAINERS
from tests.gateway.offline import MODEL, jsonl, line


def chat(custom_id: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return line(custom_id, body={"model": MODEL, "messages": [{"role": "user", "content": text}], **fields})


def written(path: Path, *entries: Any) -> Path:
    path.write_bytes(jsonl(entries))
    return path


def test_requests_are_added_up(tmp_path: Path) -> None:
    size = input_size(
        written(tmp_path / "in", chat("a", max_tokens=10), chat("b", n=3, max_completion_tokens=5), chat("c"))
    )
    assert (size.lines, size.choices, size.max_output, size.unlimited) == (3, 5, 10 + 15, 1)
    assert size.model == MODEL and size.prompt_bytes == 3 * len('[[{"role":"user","content":"hello"}]]')


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/rerank"])
def test_vectors_have_no_output(tmp_path: Path, url: str) -> None:
    body = {"model": MODEL, "input": "hello", "query": "hi", "documents": ["a"]}
    size = input_size(written(tmp_path / "in", line("a", url=url, body=body)))
    assert (size.choices, size.max_output, size.unlimited) == (1, 0, 0)
    assert size.prompt_bytes == len('["hello","hi",["a"]]')


def test_lines_that_are_not_valid_are_left_out(tmp_path: Path) -> None:
    """Some of them would take up to 100 times their size in memory."""
    bad = [b"{", b"[1]", b'"x"', b'{"body": 1}', b"\xff", b"", b"[" * 100_000]
    large = [chat("q", extra=[[]] * (MAX_CONTAINERS + 1)), {**chat("q"), "padding": "x" * MAX_LINE_BYTES}]
    assert input_size(written(tmp_path / "in", *bad, *large, chat("a"))).lines == 1


@pytest.mark.parametrize(
    ("body", "choices", "limit", "least"),
    [
        ({"prompt": "a"}, 1, 16, 0),
        ({"prompt": ["a", "b"], "n": 2, "max_tokens": 7}, 4, 7, 0),
        ({"prompt": [1, 2, 3], "best_of": 5}, 5, 16, 0),
        ({"input": "a", "max_output_tokens": 9}, 1, 9, 0),
        ({"messages": [], "max_tokens": 9, "min_tokens": 3}, 1, 9, 3),
        ({"messages": [], "max_tokens": 9, "ignore_eos": True}, 1, 9, 9),
        ({"messages": [], "max_tokens": "9", "n": -1}, 1, None, 0),
    ],
)
def test_limits_of_outputs(body: dict[str, Any], choices: int, limit: int | None, least: int) -> None:
    size = line_size(body)
    assert (size.choices, size.limit, size.min_output) == (choices, limit, least)


def test_only_what_no_earlier_prompt_begins_with_is_distinct(tmp_path: Path) -> None:
    shared = "x" * (4 * COMPARED_BLOCKS * BLOCK_BYTES)
    size = input_size(written(tmp_path / "in", *(chat(f"q{n}", f"{shared}{n}") for n in range(100))))
    assert size.prompt_bytes > 100 * len(shared)
    assert len(shared) < size.distinct_bytes < len(shared) + 100 * COMPARED_BLOCKS * BLOCK_BYTES


async def test_a_large_input_is_counted_in_another_process(tmp_path: Path) -> None:
    text = "word " * 2000
    long = written(tmp_path / "long", *(chat(f"q{n}", text) for n in range(150)))
    many = written(tmp_path / "many", chat("q1", extra=[[]] * INLINE_CONTAINERS))
    assert long.stat().st_size > INLINE_SIZE > many.stat().st_size
    for path in (long, many):
        assert await offload(path, input_size) == input_size(path)
        assert await offload(path, _process) != os.getpid()
    assert await offload(written(tmp_path / "short", chat("q1")), _process) == os.getpid()


def _process(path: Path) -> int:
    return os.getpid()


def test_sizes_add_up() -> None:
    size = InputSize(1, 2, 30, 20, 0, 7, 1, None)
    assert size.plus(InputSize(1, 1, 10, 10, 1, 0, 1, MODEL)) == InputSize(2, 3, 40, 30, 1, 7, 2, MODEL)
