"""The events of streamed answers of /v1/messages, and their order."""

import json
from itertools import groupby
from typing import Any

import pytest

from engine.interface import FinishReason
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.dialects.messages.test_answers import HI, TOOLS
from tests.gateway.routes.test_tools import CALL, stand
from tests.gateway.scripted_worker import answer_with, token_by_token
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, token_ids

CONTENT = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


async def events_of(running: Stand, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed answer. Their names must be their types."""
    body = {"model": MODEL, "max_tokens": 200, "messages": HI, "stream": True, **body}
    answer = await running.post("/v1/messages", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("It is 3.", ["text"]),
        ("<think>Hm, hm.</think>It is 3.", ["thinking", "text"]),
        (CALL, ["tool_use"]),
        ("One moment.\n" + CALL, ["text", "tool_use"]),
        ("<think>Hm.</think>One moment." + CALL + CALL, ["thinking", "text", "tool_use", "tool_use"]),
        ("", ["text"]),
    ],
)
async def test_each_block_begins_grows_and_ends_before_the_next(text: str, blocks: list[str]) -> None:
    async with stand(text) as running:
        events = await events_of(running, tools=TOOLS)
    first, *between, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    seen = [(index, [e["type"] for e in group]) for index, group in groupby(between, key=lambda e: e["index"])]
    assert [index for index, _ in seen] == list(range(len(blocks)))
    for _, types in seen:
        assert (types[0], types[-1]) == ("content_block_start", "content_block_stop")
        assert set(types[1:-1]) <= {"content_block_delta"}
    begun = [event["content_block"]["type"] for event in between if event["type"] == "content_block_start"]
    assert begun == blocks
    for event in between:
        if event["type"] == "content_block_delta":
            assert event["delta"]["type"] in (CONTENT[blocks[event["index"]]], "signature_delta")


async def test_the_deltas_of_a_block_are_its_content() -> None:
    async with stand("<think>Hm, hm.</think>One moment." + CALL) as running:
        events = await events_of(running, tools=TOOLS)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(d["thinking"] for d in deltas if d["type"] == "thinking_delta") == "Hm, hm."
    assert "".join(d["text"] for d in deltas if d["type"] == "text_delta") == "One moment."
    parts = [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"]
    assert json.loads("".join(parts)) == {"a": 1, "b": 2} and len(parts) > 5, "the input grows"
    assert [d["signature"] for d in deltas if d["type"] == "signature_delta"] == [events[0]["message"]["id"]]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[-1]["name"] == "add" and starts[-1]["input"] == {} and starts[-1]["id"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_the_first_and_the_last_event_count_tokens() -> None:
    async with running_stand(answer_with("Hello there!", cached=8)) as running:
        events = await events_of(running)
        num_tokens = len(running.worker.served[0].prompt_token_ids)
    first, last = events[0]["message"], events[-2]
    assert first["content"] == [] and first["stop_reason"] is None
    assert (first["usage"]["input_tokens"], first["usage"]["cache_read_input_tokens"]) == (num_tokens - 8, 8)
    assert first["usage"]["output_tokens"] == 0
    assert last["usage"]["output_tokens"] == len(token_ids("Hello there!"))


async def test_a_stop_sequence_is_named_at_the_end() -> None:
    async with running_stand(answer_with("3; 4")) as running:
        events = await events_of(running, stop_sequences=[";"])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ";"}


async def test_a_receipt_is_in_the_last_event() -> None:
    async with running_stand() as running:
        body = {"model": MODEL, "max_tokens": 9, "messages": HI, "stream": True}
        answer = await running.post("/v1/messages", body, headers={"x-tidegate-receipt": "1"})
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert last["type"] == "message_stop" and last["tidegate"]["tier_served"] == "realtime"


async def test_a_failure_after_the_first_event_is_an_event() -> None:
    def script(request: Request) -> list[TokenEvent]:
        return [*token_by_token(request, token_ids("It is"))[:-1], TokenEvent(request.id, EventKind.FAILED, 9)]

    async with running_stand(script) as running:
        events = await events_of(running)
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


async def test_a_stream_that_is_cut_by_its_limit() -> None:
    async with running_stand(answer_with("a b", reason=FinishReason.LENGTH)) as running:
        events = await events_of(running, max_tokens=len(token_ids("a b")))
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
