"""The order of lines: each line once, lines that begin alike beside each other, no long answer alone at the end."""

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.batches.input.checks import InputRules
from gateway.jobs.batches.input.jsonl import BOM
from gateway.jobs.batches.input.lines import BatchLine
from gateway.jobs.batches.input.order import (
    BLOCK_BYTES,
    TAIL_LINES,
    LargeLine,
    LinePrompt,
    block_digests,
    ensure_order,
    order_path,
    read_large_line,
    read_ordered_chunks,
    run_order,
)
from gateway.jobs.batches.input.scan import scan_input
from gateway.protocol.json_body import INLINE_CONTAINERS, INLINE_SIZE

SYSTEM = "You answer questions of an exam with one letter and nothing else. " * 6
MIN_TEXT = 3 * BLOCK_BYTES  # characters that are certainly a shared beginning


def chat(custom_id: str, *texts: str, **more: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[i % 3], "content": text} for i, text in enumerate(texts)]
    body = {"model": "m", "messages": messages, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def order_of(directory: Path, lines: list[dict[str, Any]]) -> list[str]:
    path = directory / "input.jsonl"
    order_path(path).unlink(missing_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    ensure_order(path)
    return [line.custom_id for chunk in read_ordered_chunks(path, ()) for line in chunk]


def prompt(number: int, text: str, limit: int) -> LinePrompt:
    return LinePrompt(number, 0, len(text), block_digests(text.encode()), limit)


# -- properties of any order -----------------------------------------------------------------------------------------

_PIECES = st.lists(st.sampled_from("abc"), max_size=4).map(lambda names: "".join(name * BLOCK_BYTES for name in names))
_PROMPTS = st.lists(st.tuples(_PIECES, st.integers(1, 3)), max_size=30).map(
    lambda found: [prompt(i, text, limit) for i, (text, limit) in enumerate(found, 1)]
)


@given(_PROMPTS)
def test_each_line_runs_once(lines: list[LinePrompt]) -> None:
    assert sorted(line.number for line in run_order(lines)) == [line.number for line in lines]


@given(_PROMPTS, st.randoms(use_true_random=False))
def test_the_order_follows_from_the_lines_alone(lines: list[LinePrompt], chance: random.Random) -> None:
    shuffled = chance.sample(lines, len(lines))
    assert run_order(shuffled) == run_order(lines)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_lines_with_the_same_examples_run_one_after_the_other(sets: list[int], data: st.DataObject) -> None:
    """57 sets of examples in turn, behind one system prompt: each set is one run of lines, whatever the outputs are."""
    limits = data.draw(st.lists(st.integers(1, 3), min_size=len(sets), max_size=len(sets)))
    texts = [SYSTEM + f"Set {n}. " * 300 + f"Question {i}?" for i, n in enumerate(sets)]
    lines = [prompt(i, text, limit) for i, (text, limit) in enumerate(zip(texts, limits, strict=True))]
    ran = [sets[line.number] for line in run_order(lines)]
    assert [n for n, _ in groupby(ran)] == list(dict.fromkeys(ran)), "no set begins twice"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.sampled_from([0, 200]))
def test_lines_with_nothing_in_common_keep_their_order_but_for_the_last_ones(limits: list[int], before: int) -> None:
    lines = [prompt(i, f"{i:04}" * 300, limit) for i, limit in enumerate([1] * before + [9] * TAIL_LINES + limits)]
    ran = [line.number for line in run_order(lines)]
    last = len(lines) - TAIL_LINES
    assert ran[:last] == list(range(last))
    assert ran[last:] == sorted(range(last, len(lines)), key=lambda i: (-lines[i].output_limit, i))


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_the_order_of_an_input_is_read_from_its_file(tmp_path: Path) -> None:
    lines = [chat(f"{i}", SYSTEM, f"{i % 2}" * MIN_TEXT, f"Ünd {i}?") for i in range(6)]
    assert order_of(tmp_path, lines) == ["0", "2", "4", "1", "3", "5"]


def test_tools_and_cache_salts_are_a_part_of_the_beginning(tmp_path: Path) -> None:
    tools = [[{"type": "function", "function": {"name": name, "description": "x" * MIN_TEXT}}] for name in "ab"]
    assert order_of(tmp_path, [chat(f"{i}", SYSTEM, tools=tools[i % 2]) for i in range(4)]) == ["0", "2", "1", "3"]
    salted = [chat(f"{i}", SYSTEM, cache_salt="ab"[i % 2] * 8) for i in range(4)]
    assert order_of(tmp_path, salted) == ["0", "2", "1", "3"]


def test_numbers_are_those_of_the_input_with_blank_lines_and_a_bom(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    texts = [json.dumps(chat(f"{i}", f"{i}")).encode() for i in range(3)]
    path.write_bytes(BOM + texts[0] + b"\r\n\n  \n" + texts[1] + b"\n" + texts[2])
    ensure_order(path)
    [chunk] = read_ordered_chunks(path, ())
    assert [(line.number, line.custom_id) for line in chunk] == [(1, "0"), (4, "1"), (5, "2")]
    assert [[line.number for line in chunk] for chunk in read_ordered_chunks(path, {1, 5})] == [[4]]


@pytest.mark.parametrize("body", [{"pad": "2" * INLINE_SIZE}, {"pad": [[]] * INLINE_CONTAINERS}])
async def test_a_large_line_is_read_when_it_runs(tmp_path: Path, body: dict[str, Any]) -> None:
    path = tmp_path / "input.jsonl"
    lines = [chat("small", "1"), chat("large", "2"), chat("last", "3")]
    lines[1]["body"] |= body
    path.write_text("".join(json.dumps(line) + "\n" for line in lines).rstrip("\n"))
    ensure_order(path)
    found = [line for chunk in read_ordered_chunks(path, ()) for line in chunk]
    [large] = [line for line in found if isinstance(line, LargeLine)]
    assert (large.number, large.num_bytes) == (2, len(json.dumps(lines[1])) + 1)
    assert [line.custom_id for line in found if isinstance(line, BatchLine)] == ["small", "last"]
    assert await read_large_line(path, large) == BatchLine(2, "large", lines[1]["body"])


def test_a_scan_writes_the_order_of_an_input_without_errors(tmp_path: Path) -> None:
    path, lines = tmp_path / "input.jsonl", [chat(f"{i}", SYSTEM, f"{i % 2}" * MIN_TEXT) for i in range(4)]
    for model, written in (("other", False), ("m", True)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        scan = scan_input(path, InputRules("/v1/chat/completions", (model,)))
        assert (order_path(path).exists(), not scan.errors) == (written, written)
    by_scan = order_path(path).read_bytes()
    order_path(path).unlink()
    ensure_order(path)
    assert order_path(path).read_bytes() == by_scan
