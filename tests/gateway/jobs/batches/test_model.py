"""The states of a batch, as a table."""

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
