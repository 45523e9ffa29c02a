"""The output items of a response and their events, from pieces of any kind."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.responses.output import Event, Output
from gateway.output.piece import Piece, ToolCallDelta

RESPONSE = "resp_" + "0" * 32


def kinds(events: list[Event]) -> list[str]:
    return [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in events)]


def test_reasoning_text_and_calls_are_items_one_after_another() -> None:
    output = Output(RESPONSE)
    pieces = [
        Piece(reasoning="th"),
        Piece(reasoning="ink", text="I lo"),
        Piece(text="ok.", tool_calls=[ToolCallDelta(0, "call_1", "weather")]),
        Piece(tool_calls=[ToolCallDelta(0, arguments='{"city"'), ToolCallDelta(0, arguments=':"Rome"}')]),
        Piece(tool_calls=[ToolCallDelta(1, "call_2", "time", "{}")]),
    ]
    events = [event for piece in pieces for event in output.feed(piece)]
    events += output.finish("completed")
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    reasoning = ["reasoning_text.delta", "reasoning_text.done"]
    text = ["output_text.delta", "output_text.done"]
    assert kinds(events) == [
        *("output_item.added", "content_part.added", *reasoning, "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *text, "content_part.done", "output_item.done"),
        *call,
        *call,
    ]
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "function_call"]
    assert output.items[0]["content"] == [{"type": "reasoning_text", "text": "think"}]
    assert output.items[1]["content"][0]["text"] == "I look."
    assert output.items[2]["call_id"] == "call_1"
    assert output.items[2]["arguments"] == '{"city":"Rome"}'
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)
    assert len({item["id"] for item in output.items}) == 4


TEXTS = st.text(max_size=3)
PIECES = st.builds(lambda reasoning, text: Piece(text=text, reasoning=reasoning), TEXTS, TEXTS)


@given(st.lists(PIECES, max_size=8))
def test_deltas_add_up_to_the_items(pieces: list[Piece]) -> None:
    output = Output(RESPONSE)
    events = [event for piece in pieces for event in output.feed(piece)] + list(output.finish("completed"))
    for item in output.items:
        deltas = [event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event]
        assert "".join(deltas) == item["content"][0]["text"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"]["id"] for event in events if event["type"] == "response.output_item.done"]
    assert added == done == [item["id"] for item in output.items]
