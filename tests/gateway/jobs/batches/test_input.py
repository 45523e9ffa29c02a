"""Errors of an input, line by line, and how a batch reports them."""

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.jobs.batches.input.checks import MAX_ERRORS, InputRules
from gateway.jobs.batches.input.jsonl import MAX_LINE_BYTES
from gateway.jobs.batches.input.lines import (
    CHUNK_BYTES,
    CHUNK_LINES,
    MAX_NUMBER,
    read_chunks,
)
from gateway.jobs.batches.input.scan import InputScan, scan_input
from tests.gateway.offline import MODEL, jsonl, line, lines, running_gateway
from tests.gateway.stand import Bytes

CHAT = "/v1/chat/completions"


def inspect(tmp_path: Path, content: bytes, **limits: Any) -> InputScan:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return scan_input(path, InputRules(CHAT, (MODEL, "other"), **limits))


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [], **changes}


@pytest.mark.parametrize(
    ("second", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'"text"', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b'{"a":' * 5000, "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (line("x", custom_id=None), "missing_required_parameter", "custom_id"),
        (line("x", method=None), "missing_required_parameter", "method"),
        (line("x", url=None), "missing_required_parameter", "url"),
        (line("x", body=None), "missing_required_parameter", "body"),
        (line("x", custom_id=7), "invalid_type", "custom_id"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line("x", method="GET"), "invalid_method", "method"),
        (line("x", url="/v1/completions"), "url_mismatch", "url"),
        (line("x", url=["/v1"]), "url_mismatch", "url"),
        (line("x", body="text"), "invalid_type", "body"),
        (line("x", body={"messages": []}), "missing_required_parameter", "body.model"),
        (line("x", body=body(model=["a"])), "invalid_type", "body.model"),
        (line("x", body=body(model="gpt-9")), "model_not_found", "body.model"),
        (line("x", body=body(model="other")), "model_mismatch", "body.model"),
        (line("x", body=body(stream=True)), "unsupported_parameter", "body.stream"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, second: Any, code: str, param: str | None) -> None:
    [error] = inspect(tmp_path, jsonl([line("first"), second, line("third")])).errors
    assert (error.code, error.param, error.line) == (code, param, 2)


def test_blank_lines_count_as_places_but_not_as_requests(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + jsonl([line("a"), b"", b"   "]) + jsonl([line("b")]).replace(b"\n", b"\r\n")
    report = inspect(tmp_path, content)
    assert (report.total, report.model, report.errors) == (2, MODEL, ())
    assert report.sha256 == hashlib.sha256(content).hexdigest() and report.size.lines == 2
    [chunk] = read_chunks(tmp_path / "in.jsonl")
    assert [(x.number, x.custom_id) for x in chunk] == [(1, "a"), (4, "b")]


def test_a_line_may_ask_for_the_tier_that_it_gets(tmp_path: Path) -> None:
    tiers = [None, "auto", "default", "flex"]
    wanted = [line(f"q{n}", body=body(service_tier=tier)) for n, tier in enumerate(tiers)]
    assert inspect(tmp_path, jsonl(wanted)).errors == ()
    for other in ("priority", "scale", "fast", "no-such", ["flex"]):
        [error] = inspect(tmp_path, jsonl([line("q", body=body(service_tier=other))])).errors
        assert (error.code, error.param) == ("invalid_value", "body.service_tier") and "flex" in error.message


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    [error] = inspect(tmp_path, content).errors
    assert (error.code, error.line) == ("empty_file", None)


def test_too_many_lines(tmp_path: Path) -> None:
    assert inspect(tmp_path, jsonl(lines(4)), max_lines=4).errors == ()
    [error] = inspect(tmp_path, jsonl(lines(5)), max_lines=4).errors
    assert error.code == "too_many_tasks" and "more than 4 requests" in error.message


def test_line_numbers_are_bounded(tmp_path: Path) -> None:
    [error] = inspect(tmp_path, jsonl([line("a")]) + b"\n" * MAX_NUMBER + jsonl([line("b")])).errors
    assert error.code == "too_many_tasks" and "blank" in error.message


def test_reading_stops_at_the_last_error_that_is_reported(tmp_path: Path) -> None:
    report = inspect(tmp_path, b"x\n" * 500)
    assert [e.line for e in report.errors] == list(range(1, MAX_ERRORS + 1))
    assert report.total == MAX_ERRORS


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_may_be_as_large_as_a_body_and_no_larger(tmp_path: Path, end: bytes) -> None:
    first, last = json.dumps(line("first")).encode(), json.dumps(line("last")).encode()
    longest = last + b" " * (300_000 - len(last) - 1) + b"\t"
    assert inspect(tmp_path, first + b"\n" + last + b"\n", max_line_bytes=len(last)).total == 2
    assert inspect(tmp_path, first + b"\n" + longest + end, max_line_bytes=300_000).errors == ()
    content = first + b"\n" + b"x" + longest + b"\n" + last + end
    report = inspect(tmp_path, content, max_line_bytes=300_000)
    [error] = report.errors
    assert (error.code, error.line, report.total) == ("line_too_large", 2, 3)


def test_a_line_of_50_mb_is_named_and_not_held_in_memory(tmp_path: Path) -> None:
    content = jsonl([line("a"), b"x" * 50 * 10**6, b"\xff", line("a")])
    tracemalloc.start()
    errors = inspect(tmp_path, content).errors
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = [(error.code, error.line) for error in errors]
    assert found == [("line_too_large", 2), ("invalid_json_line", 3), ("duplicate_custom_id", 4)]
    assert peak_bytes < 3 * MAX_LINE_BYTES


def test_a_chunk_is_bounded_in_lines_and_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(lines(CHUNK_LINES + 1)))
    assert [len(chunk) for chunk in read_chunks(path)] == [CHUNK_LINES, 1]
    path.write_bytes(jsonl(line(f"q{n}", body=body(user="x" * (CHUNK_BYTES // 2))) for n in range(3)))
    assert [[x.custom_id for x in chunk] for chunk in read_chunks(path)] == [["q0", "q1"], ["q2"]]


async def test_a_wrong_input_fails_the_batch_and_runs_nothing(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path) as gateway:
        created = await gateway.submit([line("a"), b"{", line("a")])
        assert created.status == "validating"
        batch = await gateway.ended(created.id)
        assert batch.status == "failed" and batch.failed_at is not None and batch.in_progress_at is None
        assert batch.errors is not None and batch.errors.data is not None
        found = [(e.code, e.line, e.param) for e in batch.errors.data]
        assert found == [("invalid_json_line", 2, None), ("duplicate_custom_id", 3, "custom_id")]
        assert batch.errors.data[0].message == "This line is not parseable as valid JSON."
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 0, "completed": 0, "failed": 0}
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert not gateway.completions.calls


async def test_a_line_larger_than_any_request_fails_the_batch(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path, max_body_mb=Bytes(1000)) as gateway:
        batch = await gateway.ended((await gateway.submit([line("a"), line("b", note="x" * 1000)])).id)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert [(e.code, e.line) for e in batch.errors.data] == [("line_too_large", 2)]
