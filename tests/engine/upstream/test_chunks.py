import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface import FinishReason, TokenLogprobs
from engine.streaming import UpstreamLost, UpstreamRefused
from engine.upstream.chunks import EventSplitter, Piece, reader_of
from engine.upstream.dialects import LLAMA_CPP, SGLANG, VLLM, Dialect

STREAM = b': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\ndata: {"c": 3}\n\n'


LOGPROBS = {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:6": -3, "token_id:5": -1}]}
# A usual event of each dialect.
CHUNKS: dict[str, dict[str, Any]] = {
    "vllm": {
        "choices": [{"text": "a", "token_ids": [5], "logprobs": LOGPROBS, "finish_reason": "stop"}],
        "error": None,
    },
    "sglang": {
        "output_ids": [5],
        "meta_info": {"completion_tokens": 1, "cached_tokens": 2, "finish_reason": {"type": "stop"}},
    },
    "llama.cpp": {
        "content": "a",
        "tokens": [5],
        "stop": True,
        "stop_type": "limit",
        "completion_probabilities": [{"id": 5, "logprob": -1.0, "top_logprobs": [{"id": 6, "logprob": -2.0}]}],
    },
}
EACH = pytest.mark.parametrize("dialect", [VLLM, SGLANG, LLAMA_CPP], ids=lambda d: d.name)


def read(dialect: Dialect, *events: Any) -> list[Piece]:
    reader = reader_of(dialect)
    return [reader.read(json.dumps(event).encode()) for event in events]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    splitter, ends = EventSplitter(), [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    assert [e for part in parts for e in splitter.feed(part)] == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b'{"c": 3}']


def test_openai_events() -> None:
    piece, usage = read(VLLM, CHUNKS["vllm"], {"choices": [], "usage": {}})
    assert piece == Piece([5], "a", FinishReason.STOP, [TokenLogprobs(5, -1.0, ((5, -1.0), (6, -3.0)))])
    assert usage == Piece()


def test_sglang_refuses_a_request_for_good_inside_of_the_stream() -> None:
    finish = {"type": "abort", "status_code": 400, "message": "The prompt is too long"}
    with pytest.raises(UpstreamRefused, match="too long"):
        read(SGLANG, {"output_ids": [], "meta_info": {"finish_reason": finish}})
    with pytest.raises(UpstreamLost):
        read(SGLANG, {"output_ids": [], "meta_info": {"finish_reason": {**finish, "status_code": 503}}})


def test_the_last_event_says_how_many_tokens_were_cached() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(VLLM, {"choices": [], "usage": usage}) == [Piece(cached_tokens=8, prompt_tokens=9)]
    assert read(VLLM, {"choices": [], "usage": {**usage, "prompt_tokens_details": None}}) == [Piece(prompt_tokens=9)]
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "timings": {"cache_n": 14}}
    assert read(LLAMA_CPP, last) == [Piece(finish_reason=FinishReason.LENGTH, cached_tokens=14)]


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
    first, last = read(LLAMA_CPP, {**CHUNKS["llama.cpp"], "stop": False}, {"stop": True, "stop_type": "limit"})
    assert first == Piece([5], "a", logprobs=[TokenLogprobs(5, -1.0, ((6, -2.0),))])
    assert last == Piece(finish_reason=FinishReason.LENGTH)


def test_llama_cpp_sends_only_the_last_id_of_a_character_of_several_tokens() -> None:
    def event(number: int, text: str, predicted: int) -> dict[str, Any]:
        return {"content": text, "tokens": [number], "tokens_predicted": predicted}

    pieces = read(LLAMA_CPP, event(7, "a", 1), event(403, "\U0001fae5", 5), event(8, "b", 6), {"stop": True})
    assert [piece.lacks_ids for piece in pieces] == [False, True, False, False]


@EACH
@pytest.mark.parametrize(
    "data",
    [
        '{"error": {"message": "out of memory"}}',
        '{"cho',
        "[]",
        '{"error": ' + 100_000 * "[",
        '{"content": "\\ud800", "choices": [{"text": "\\ud800"}], "output_ids": "\\ud800"}',
        '{"tokens": [1e400], "choices": [{"token_ids": [1e400]}], "output_ids": [1e400]}',
    ],
)
def test_errors_and_garbage_are_a_lost_stream(dialect: Dialect, data: str) -> None:
    with pytest.raises(UpstreamLost):
        reader_of(dialect).read(data.encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.from_regex("token_id:[0-9]+"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def near(usual: Any) -> st.SearchStrategy[Any]:
    """Return values like `usual`, in which any part may be missing, repeated or another one."""
    if isinstance(usual, dict):
        same = st.fixed_dictionaries({}, optional={key: near(value) for key, value in usual.items()})
    elif isinstance(usual, list):
        same = st.lists(near(usual[0]), max_size=3)
    else:
        same = st.just(usual)
    return st.one_of(same, same, same, JSON)


@EACH
@given(data=st.data())
@settings(max_examples=2 * settings().max_examples)
def test_a_chunk_of_any_form_is_read_or_lost(dialect: Dialect, data: st.DataObject) -> None:
    chunks = data.draw(st.lists(near(CHUNKS[dialect.name]).map(encoded) | st.binary(), min_size=1, max_size=3))
    reader = reader_of(dialect)
    with suppress(UpstreamLost):
        for chunk in chunks:
            piece = reader.read(chunk)
            assert all(type(token_id) is int for token_id in piece.token_ids) and type(piece.text) is str
            assert piece.finish_reason is None or isinstance(piece.finish_reason, FinishReason)
            assert piece.cached_tokens >= 0 and len(piece.logprobs) in (0, len(piece.token_ids))
            piece.text.encode()


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    "change",
    [{"token_logprobs": []}, {"tokens": []}, {"top_logprobs": [{}, {}]}, {"tokens": ["token_id:" + 5000 * "9"]}],
)
def test_log_probabilities_that_fit_no_token_are_a_lost_stream(change: dict[str, Any]) -> None:
    with pytest.raises(UpstreamLost):
        read(VLLM, {"choices": [{"text": "a", "token_ids": [5], "logprobs": LOGPROBS | change}]})


def test_a_server_that_aborts_a_request_has_lost_it() -> None:
    with pytest.raises(UpstreamLost, match="abort"):
        read(VLLM, {"choices": [{"text": "", "finish_reason": "abort"}]})
