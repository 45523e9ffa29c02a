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


def test_tokens_of_one_character_are_reported_together() -> None:
    tracker = TokenTracker(offset=7)
    for token_id in (1, 2, 3):
        tracker.add(token_id, None)
        tracker.note(0, 0)
        assert taken(tracker) == []
    tracker.add(4, None)
    tracker.note(1, 1)
    assert taken(tracker) == [(1, 7), (2, 7), (3, 7), (4, 7)]


def test_a_token_without_text_is_reported_only_before_other_text() -> None:
    tracker = TokenTracker()
    tracker.add(1, None)  # a special token
    tracker.add(2, None)
    tracker.note(1, 1)
    tracker.add(3, None)  # the end of the output
    assert taken(tracker) == [(1, 0), (2, 0)]
    assert taken(tracker) == []


def test_all_tokens_are_reported_if_the_client_wants_their_ids() -> None:
    tracker = TokenTracker(reports_all=True)
    tracker.add(1, None)
    tracker.add(2, None)
    assert taken(tracker) == [(1, 0), (2, 0)]
