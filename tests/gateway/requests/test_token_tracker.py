"""Which tokens of an output are reported, and when."""

from gateway.requests.tokens.token_tracker import TokenTracker


def taken(tracker: TokenTracker) -> list[tuple[int, int]]:
    return [(token.token_id, token.text_offset) for token in tracker.pop_reportable()]


def test_a_token_is_reported_when_some_of_its_text_is_shown() -> None:
    tracker = TokenTracker()
    tracker.add(1, None)
    tracker.note(2, 0)  # held back: it may begin a stop string
    assert taken(tracker) == []
    tracker.add(2, None)
    tracker.note(2, 3)
    assert taken(tracker) == [(1, 0), (2, 2)]
