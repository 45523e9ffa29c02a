"""The reader of answers, fed by hand: what counts as a token, and when it came."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.answer import AnswerReader, Outcome


def make_reader(streamed: bool = True) -> AnswerReader:
    outcome = Outcome("chat", 0, due_s=1.0, sent_s=1.05, status=200)
    return AnswerReader(outcome, streamed)


def event(text: str = "", tokens: int | None = None, finish: str | None = None, **more: object) -> bytes:
    body: dict[str, object] = {"choices": [{"delta": {"content": text}, "finish_reason": finish}], **more}
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 5, "completion_tokens": tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def test_the_first_token_is_the_first_event_with_output_not_the_role() -> None:
    reader = make_reader()
    reader.feed(event("", tokens=0), 1.1)
    reader.feed(event("Hi", tokens=1), 1.3)
    assert reader.outcome.ttft_s == pytest.approx(0.3)


def test_what_was_given_up_has_waited_at_least_so_long() -> None:
    silent = Outcome("chat", 0, due_s=10.0, given_up_s=30.0)
    assert (silent.ttft_s, silent.e2e_s) == (20.0, 20.0)
    slow = Outcome("chat", 0, due_s=10.0, progress=[(12.0, 1)], given_up_s=30.0)
    assert (slow.ttft_s, slow.e2e_s) == (2.0, 20.0)
    cut = Outcome("backlog", 0, due_s=10.0)
    assert (cut.ttft_s, cut.e2e_s) == (None, None)


def test_tokens_of_one_event_came_together_after_one_gap() -> None:
    reader = make_reader()
    reader.feed(event("a", tokens=1), 2.0)
    reader.feed(event("bcd", tokens=4), 2.5)
    reader.feed(event("e", tokens=5), 2.75)
    assert reader.outcome.inter_token_s() == pytest.approx([0.5, 0.0, 0.0, 0.25])


def test_a_token_that_shows_no_text_yet_is_a_token() -> None:
    reader = make_reader()
    reader.feed(event("a", tokens=1), 2.0)
    reader.feed(event("", tokens=2), 2.1)
    assert reader.outcome.completion_tokens == 2
    assert reader.outcome.inter_token_s() == pytest.approx([0.1])


def test_final_usage_is_the_last_word_on_tokens() -> None:
    reader = make_reader()
    reader.feed(event("a"), 2.0)
    reader.feed(event("", finish="stop"), 3.0)
    reader.feed(b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n', 3.0)
    reader.finish(3.0)
    assert reader.outcome.completion_tokens == 3
    assert reader.outcome.prompt_tokens == 5


def test_tokens_are_counted_in_the_window_in_which_they_came() -> None:
    reader = make_reader()
    for at_s, tokens in [(1.0, 1), (2.0, 3), (3.0, 4), (4.0, 6)]:
        reader.feed(event("x", tokens=tokens), at_s)
    assert reader.outcome.tokens_between(2.0, 4.0) == 3


@given(cuts=st.lists(st.integers(0, 400), max_size=12), crlf=st.booleans())
def test_the_way_bytes_are_cut_into_reads_changes_nothing(cuts: list[int], crlf: bool) -> None:
    stream = b": ping\n\n" + event("grü", tokens=1) + event("ß", tokens=2, finish="stop") + b"data: [DONE]\n\n"
    stream = stream.replace(b"\n", b"\r\n") if crlf else stream
    edges = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    reader = make_reader()
    for start, end in zip(edges, edges[1:], strict=False):
        reader.feed(stream[start:end], 2.0)
    reader.finish(3.0)
    assert reader.outcome.text == "grüß"
    assert reader.outcome.is_complete and reader.outcome.completion_tokens == 2


def test_an_error_inside_the_stream_is_the_outcome() -> None:
    reader = make_reader()
    reader.feed(event("a", tokens=1), 2.0)
    reader.feed(b'data: {"error":{"message":"worker lost","code":"engine_dead"}}\n\n', 2.1)
    reader.finish(2.2)
    assert reader.outcome.error == "engine_dead: worker lost"
    assert not reader.outcome.is_complete


def test_a_stream_without_an_end_is_an_error() -> None:
    reader = make_reader()
    reader.feed(event("a", tokens=1), 2.0)
    reader.finish(2.2)
    assert reader.outcome.error == "stream ended without a finish_reason"


def test_rubbish_is_an_error_not_an_exception() -> None:
    reader = make_reader()
    reader.feed(b"data: {oops\n\n", 2.0)
    reader.finish(2.0)
    assert reader.outcome.error is not None and "not an OpenAI answer" in reader.outcome.error


def test_a_whole_answer_counts_when_it_ends() -> None:
    reader = make_reader(streamed=False)
    body = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], "service_tier": "flex"}
    reader.feed(json.dumps(body | {"usage": {"prompt_tokens": 2, "completion_tokens": 4}}).encode(), 2.0)
    reader.finish(2.5)
    outcome = reader.outcome
    assert (outcome.text, outcome.completion_tokens, outcome.service_tier) == ("hello", 4, "flex")
    assert outcome.e2e_s == pytest.approx(1.5)
