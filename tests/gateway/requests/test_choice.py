"""One choice: what it reports of reasoning, of the end, and of outputs that come at once or token by token."""

import pytest

from engine.interface import FinishReason, TokenLogprobs
from gateway.output.piece import Piece
from gateway.requests.answers.choice import Choice, TokenTracker
from gateway.requests.tokens.stop_strings import StopMatcher
from scheduler.request import EventKind, TokenEvent
from tests.gateway.tiny_model import text_of, tiny_tokenizer, token_ids


class ReasonsUntilBar:
    """A parser whose reasoning ends with the first `|`."""

    def __init__(self) -> None:
        self.in_reasoning = True
        self.ended_in_call = False

    def feed(self, text: str) -> Piece:
        if not self.in_reasoning:
            return Piece(text)
        reasoning, bar, rest = text.partition("|")
        self.in_reasoning = not bar
        return Piece(rest, reasoning)

    def flush(self) -> Piece:
        return Piece()


def events(text: str, *, at_once: bool) -> list[TokenEvent]:
    ids = token_ids(text)
    scores = tuple(TokenLogprobs(token_id, -float(n)) for n, token_id in enumerate(ids))
    if at_once:
        return [TokenEvent("r", EventKind.FINISHED, 0, ids, FinishReason.LENGTH, logprobs=scores)]
    steps = [TokenEvent("r", EventKind.TOKENS, n, (i,), logprobs=scores[n : n + 1]) for n, i in enumerate(ids)]
    return [*steps, TokenEvent("r", EventKind.FINISHED, len(ids), (), FinishReason.LENGTH)]


def run(choice: Choice, text: str, at_once: bool) -> Piece:
    whole = Piece()
    for event in events(text, at_once=at_once):
        if choice.finish_reason is None:
            whole.extend(choice.feed(event))
    return whole


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("hides", [True, False])
def test_tokens_of_hidden_reasoning_are_not_reported(hides: bool, at_once: bool) -> None:
    choice = Choice(
        0,
        tiny_tokenizer().decoder(),
        None,
        ReasonsUntilBar(),
        hides_reasoning=hides,
        tracker=TokenTracker(),
    )
    whole = run(choice, "hmm|yes", at_once)
    assert (whole.text, whole.reasoning) == ("yes", "hmm")
    assert text_of([token.token_id for token in whole.tokens]) == ("yes" if hides else "hmm|yes")
    assert choice.num_reasoning_tokens == len(token_ids("hmm|"))
    assert choice.sum_logprobs == -sum(range(choice.num_tokens))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stop", ["wo t", "e", "three", "nowhere", "one"])
def test_what_is_reported_does_not_depend_on_the_delivery(stop: str, at_once: bool) -> None:
    text = "one two 😀 three"
    choice = Choice(0, tiny_tokenizer().decoder(), StopMatcher([stop]), tracker=TokenTracker())
    whole = run(choice, text, at_once)
    assert whole.text == text.partition(stop)[0]
    reported = text_of([token.token_id for token in whole.tokens])
    assert reported.startswith(whole.text)
    assert all(token.text_offset < len(whole.text) for token in whole.tokens)
    assert choice.stop_reason == (stop if stop in text else None)


def test_a_token_is_reported_when_some_of_its_text_is_shown() -> None:
    tracker = TokenTracker()
    tracker.add(1, None)
    tracker.note(2, 0)  # held back: it may begin a stop string
    assert tracker.pop_reportable() == []
    tracker.add(2, None)
    tracker.note(2, 3)
    assert [(token.token_id, token.text_offset) for token in tracker.pop_reportable()] == [(1, 0), (2, 2)]
