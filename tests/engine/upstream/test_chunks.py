import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import FinishReason, TokenLogprobs
from engine.streaming import UpstreamLost
from engine.upstream.chunks import EventSplitter, Piece, reader_of
from engine.upstream.dialects import LLAMA_CPP, SGLANG, VLLM, Dialect

STREAM = b': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\ndata: {"c": 3}\n\n'


def read(dialect: Dialect, *events: Any) -> list[Piece]:
    reader = reader_of(dialect)
    return [reader.read(json.dumps(event).encode()) for event in events]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    splitter, ends = EventSplitter(), [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    assert [e for part in parts for e in splitter.feed(part)] == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b'{"c": 3}']


def test_openai_events() -> None:
    logprobs = {
        "tokens": ["token_id:5"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"token_id:6": -3, "token_id:5": -1}],
    }
    first, last, usage = read(
        VLLM,
        {"choices": [{"text": "a", "token_ids": [5], "logprobs": logprobs, "finish_reason": None}]},
        {"choices": [{"text": "b", "token_ids": [6], "finish_reason": "stop"}]},
        {"choices": [], "usage": {}},
    )
    assert (first.token_ids, first.text, first.finish_reason) == ([5], "a", None)
    assert first.logprobs == [TokenLogprobs(5, -1.0, ((5, -1.0), (6, -3.0)))]
    assert (last.token_ids, last.finish_reason) == ([6], FinishReason.STOP)
    assert usage == Piece()


def test_sglang_events_hold_all_tokens_or_only_the_new_ones() -> None:
    def event(ids: list[int], count: int, finish: Any = None) -> dict[str, Any]:
        return {
            "output_ids": ids,
            "meta_info": {"completion_tokens": count, "cached_tokens": 2, "finish_reason": finish},
        }

    end = {"type": "length", "length": 3}
    whole = read(SGLANG, event([5], 1), event([5, 6], 2), event([5, 6, 7], 3, end))
    parts = read(SGLANG, event([5], 1), event([6], 2), event([7], 3, end))
    for pieces in (whole, parts):
        assert [p.token_ids for p in pieces] == [[5], [6], [7]]
        assert [p.finish_reason for p in pieces] == [None, None, FinishReason.LENGTH]
        assert pieces[0].cached_tokens == 2


def test_llama_cpp_events() -> None:
    probs = [{"id": 5, "token": "a", "logprob": -1.0, "top_logprobs": [{"id": 6, "logprob": -2.0}]}]
    first, last = read(
        LLAMA_CPP,
        {"content": "a", "tokens": [5], "stop": False, "completion_probabilities": probs},
        {"content": "", "tokens": [], "stop": True, "stop_type": "limit"},
    )
    assert (first.token_ids, first.logprobs) == ([5], [TokenLogprobs(5, -1.0, ((6, -2.0),))])
    assert last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("dialect", [VLLM, SGLANG, LLAMA_CPP], ids=lambda d: d.name)
@pytest.mark.parametrize("data", [b'{"error": {"message": "out of memory"}}', b'{"cho', b"[]"])
def test_errors_and_garbage_are_a_lost_stream(dialect: Dialect, data: bytes) -> None:
    with pytest.raises(UpstreamLost):
        reader_of(dialect).read(data)


def test_a_server_that_aborts_a_request_has_lost_it() -> None:
    with pytest.raises(UpstreamLost, match="abort"):
        read(VLLM, {"choices": [{"text": "", "finish_reason": "abort"}]})
