"""Receipts: the object `tidegate` in whole answers and in the last chunk of streams, only if it was asked for."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.requests.answers.receipt import receipt_object
from scheduler.request import Receipt, Request, TokenEvent
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ASK = {"x-tidegate-receipt": "1"}
DONE = Receipt("w1", 1.5, 20.0, 300.0, paused_ms=4.0, preemptions=1, suspensions=2, engine_ms=30.5)
TIMES = {
    "worker": "w1",
    "queue_ms": 1.5,
    "prefill_ms": 20.0,
    "decode_ms": 300.0,
    "paused_ms": 4.0,
    "preemptions": 1,
    "suspensions": 2,
    "engine_ms": 30.5,
    "cached_tokens": 3,
}


def answer_with_receipts(request: Request) -> Sequence[TokenEvent]:
    """Do what a worker does: each event of a request that wants a receipt has one."""
    events = answer_with("Hello there!", cached=3)(request)
    return [msgspec.structs.replace(event, receipt=DONE) for event in events] if request.wants_receipt else events


async def chunks_of(stand: Stand, **more: Any) -> list[dict[str, Any]]:
    response = await stand.post("/v1/chat/completions", {**CHAT, "stream": True, **more}, headers=ASK)
    *frames, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def test_a_whole_answer_has_a_receipt() -> None:
    async with running_stand(answer_with_receipts) as stand:
        answer = (await stand.post("/v1/chat/completions", {**CHAT, "service_tier": "flex"}, headers=ASK)).json()
        text = (await stand.post("/v1/completions", {"model": MODEL, "prompt": "a"}, headers=ASK)).json()
    receipt = answer["tidegate"]
    assert 0 <= receipt.pop("total_ms") < 60_000
    assert receipt == {"tier_requested": "flex", "tier_served": "bulk", **TIMES}
    assert (text["tidegate"]["tier_requested"], text["tidegate"]["tier_served"]) == ("auto", "realtime")


@pytest.mark.parametrize("usage", [False, True])
async def test_only_the_last_chunk_of_a_stream_has_it(usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    async with running_stand(answer_with_receipts) as stand:
        chunks = await chunks_of(stand, **options)
    assert ["tidegate" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["tidegate"]["queue_ms"] == 1.5
    assert (chunks[-1]["choices"] == []) is usage


async def test_an_answer_that_a_stop_string_ends_has_one_too() -> None:
    async with running_stand(answer_with_receipts) as stand:
        chunks = await chunks_of(stand, stop="there")
        whole = (await stand.post("/v1/chat/completions", {**CHAT, "stop": "there"}, headers=ASK)).json()
    assert chunks[-1]["tidegate"]["worker"] == whole["tidegate"]["worker"] == "w1"


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_receipts_too(stream: bool) -> None:
    body = {"model": MODEL, "input": "hi", "service_tier": "flex", "stream": stream}
    async with running_stand(answer_with_receipts) as stand:
        answer = await stand.post("/v1/responses", body, headers=ASK)
        other = await stand.post("/v1/responses", body)
    assert '"tidegate"' not in other.text
    if not stream:
        assert answer.json()["tidegate"]["tier_requested"] == "flex"
        return
    events = [json.loads(frame.partition("data: ")[2]) for frame in answer.text.strip().split("\n\n")]
    assert [event["type"] for event in events if '"tidegate"' in json.dumps(event)] == ["response.completed"]
    assert events[-1]["response"]["tidegate"]["worker"] == "w1"


def test_the_times_at_the_top_are_those_of_the_slowest_sequence() -> None:
    slow = replace(DONE, worker="w2", decode_ms=900.0)
    receipt = receipt_object("auto", "realtime", 950, [(DONE, 0), (slow, 0)])
    assert (receipt["worker"], receipt["decode_ms"]) == ("w2", 900.0)
    assert receipt["engine_ms"] == 61.0, "the engine time is that of all sequences"


@pytest.mark.parametrize("headers", [{}, {"x-tidegate-receipt": "0"}, {"x-tidegate-receipt": "false"}])
async def test_nobody_else_gets_one(headers: dict[str, str]) -> None:
    async with running_stand(answer_with_receipts) as stand:
        answer = (await stand.post("/v1/chat/completions", CHAT, headers=headers)).json()
        stream = await stand.post("/v1/chat/completions", {**CHAT, "stream": True}, headers=headers)
        assert not any(request.wants_receipt for request in stand.worker.served)
    assert "tidegate" not in answer and '"tidegate"' not in stream.text
