"""The table of the facade relates our rate to the proxy's with the same load."""

from bench.facade import FacadePart, facade_record
from loadtest.client.answer import Outcome


def part(arm: str, complete: int, broken: int = 0) -> FacadePart:
    outcomes = [Outcome(arm, i, due_s=0.0, sent_s=0.0, finished_s=0.1) for i in range(complete)]
    outcomes += [Outcome(arm, i, due_s=0.0, error="HTTP 500") for i in range(broken)]
    return FacadePart(arm, 64, True, 2.0, outcomes, 0.5)


def test_the_rate_counts_complete_answers_and_is_related_to_the_proxys() -> None:
    record = facade_record([part("tidegate", 100), part("litellm", 10, broken=30), part("tidegate", 140)])
    [section] = record.sections
    assert section.table is not None
    ours, proxy = (row.cells for row in section.table.rows)
    assert ours[:5] == ("64", "streamed", "tidegate", "60", "12.0")
    assert proxy[3:5] == ("5", "–") and proxy[7] == "30"
