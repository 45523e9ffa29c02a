"""The events of POST /v1/responses, read by the official client in its strict mode."""

import json
from typing import Any

from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, token_ids

IN_ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def events_of(stand: Stand, **options: Any) -> list[Any]:
    stream = await stand.client.responses.create(model=MODEL, input="hi", stream=True, **options)
    return [event async for event in stream]


def without_repeats(kinds: list[str]) -> list[str]:
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


async def test_the_events_of_a_text_come_in_openais_order() -> None:
    async with running_stand("Hello there!") as stand:
        events = await events_of(stand)
    assert without_repeats([event.type for event in events]) == IN_ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "Hello there!"
    final = events[-1].response
    assert final.status == "completed"
    assert final.output_text == "Hello there!"
    assert final.usage.output_tokens == len(token_ids("Hello there!"))
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert item_ids == {final.output[0].id}


async def test_every_frame_has_an_event_line_and_no_id_line_and_there_is_no_done() -> None:
    async with running_stand("ok") as stand:
        answer = await stand.post("/v1/responses", {"model": MODEL, "input": "hi", "stream": True})
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        event, data = frame.split("\n")
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_failure_after_the_first_token_is_an_event() -> None:
    def script(request: Request) -> list[TokenEvent]:
        tokens = token_ids("abc")
        return [
            TokenEvent(request.id, EventKind.TOKENS, 0, tokens),
            TokenEvent(request.id, EventKind.FAILED, len(tokens), error="boom"),
        ]

    async with running_stand(script) as stand:
        events = await events_of(stand)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "boom" not in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_client_that_hangs_up_cancels_the_generation() -> None:
    from tests.waiting import until

    async with running_stand("Hello there!") as stand:
        stand.worker.gate.clear()
        stream = await stand.client.responses.create(model=MODEL, input="hi", stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        await stream.close()
        await until(lambda: stand.waiting == 0)
        await until(lambda: bool(stand.worker.cancelled))


async def test_a_websocket_is_refused_with_the_way_out() -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with running_stand() as stand:
        answer = await stand.http.get("/v1/responses", headers=headers)
        plain = await stand.http.get("/v1/responses")
    assert (answer.status_code, plain.status_code) == (426, 405)
    assert "server-sent events" in answer.json()["error"]["message"]
