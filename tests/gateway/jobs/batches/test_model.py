"""The states of a batch, as a table."""

from gateway.jobs.batches.input.checks import LineError
from gateway.jobs.batches.model import TRANSITIONS, Batch, BatchStatus

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


def test_sources_are_the_table_read_backwards() -> None:
    assert set(S.CANCELLING.sources) == {S.VALIDATING, S.IN_PROGRESS}
    assert S.COMPLETED.sources == (S.FINALIZING,)
    assert S.VALIDATING.sources == ()


def test_each_state_but_the_first_has_its_time() -> None:
    batch = Batch("batch_1", "/v1/completions", "file-1", "24h", S.VALIDATING, 1, 2)
    body = batch.to_json()
    assert {f"{s.value}_at" for s in S if s is not S.VALIDATING} <= set(body)


def test_errors_are_a_list_object_or_null() -> None:
    batch = Batch("batch_1", "/v1/completions", "file-1", "24h", S.VALIDATING, 1, 2)
    assert batch.to_json()["errors"] is None
    failed = Batch("b", "/v1/completions", "f", "24h", S.FAILED, 1, 2, errors=(LineError("c", "m", None, 3),))
    data = [{"code": "c", "message": "m", "param": None, "line": 3}]
    assert failed.to_json()["errors"] == {"object": "list", "data": data}
