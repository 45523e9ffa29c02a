"""The states of a batch, as a table, and its completion window as text and seconds."""

import pytest

from gateway.jobs.batches.completion_window import InvalidWindow, window_s
from gateway.jobs.batches.model import TRANSITIONS, BatchStatus

S = BatchStatus


def test_every_state_is_reachable_and_the_ends_are_ends() -> None:
    reached, frontier = {S.VALIDATING}, [S.VALIDATING]
    while frontier:
        new = TRANSITIONS[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(S)
    assert {s for s in S if s.is_terminal} == {S.FAILED, S.COMPLETED, S.EXPIRED, S.CANCELLED}


def test_no_state_is_ever_entered_again() -> None:
    def reachable(status: BatchStatus) -> set[BatchStatus]:
        return set(TRANSITIONS[status]).union(*(reachable(s) for s in TRANSITIONS[status]))

    for status in S:
        assert status not in reachable(status)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h", 3600), ("24h", 86_400), ("7d", 604_800), ("30d", 2_592_000)]
)
def test_a_duration_is_a_window(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "24", "h", "0h", "59s", "31d", "-1h", "1.5h", "24 h", "24H", "1h30m", "١h", "9" * 99]
)
def test_anything_else_is_refused_with_the_windows_that_there_are(text: str) -> None:
    with pytest.raises(InvalidWindow, match='from "1m" to "30d"'):
        window_s(text)
