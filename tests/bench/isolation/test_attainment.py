"""What counts as in time."""

import pytest

from bench.isolation.slos import MissCount, attainment_of, has_met
from loadtest.client.answer import Outcome
from loadtest.client.runner import ArmRun
from loadtest.traffic.scenario import Targets
from tests.bench.isolation.builders import START_S, answered

SLO = Targets(ttft_ms=100, itl_ms=50)


@pytest.mark.parametrize(
    ("ttft_s", "gaps_s", "met"),
    [
        (0.1, (0.05, 0.05), True),
        (0.101, (0.01,), False),
        (0.05, (0.01, 0.2), False),
        (0.05, (0.01,) * 200 + (0.2,), True),  # one gap in 200 is within a p99
        (0.05, (), True),
    ],
)
def test_a_request_is_in_time_if_all_its_targets_are_met(ttft_s: float, gaps_s: tuple[float, ...], met: bool) -> None:
    assert has_met(answered("chat", 0.0, ttft_s, gaps_s), SLO) is met


def test_what_was_refused_or_never_ended_is_a_miss() -> None:
    refused = Outcome("chat", 0, 1.0, error="429: no", finished_s=1.01)
    waiting = Outcome("chat", 1, 1.0, error="unfinished", given_up_s=9.0)
    seen = attainment_of([refused, waiting, answered("chat", 0.0, 0.05)], SLO)
    assert (seen.offered, seen.met) == (3, 1) and seen.share == pytest.approx(1 / 3)
    assert attainment_of([], SLO).share is None


def test_misses_are_counted_while_an_arm_runs_each_of_them_once() -> None:
    run, missed = ArmRun(START_S, 10.0, {"chat": []}, planned=9), MissCount({"chat": SLO})
    late_first, no_first = answered("chat", 0.0, 0.5), Outcome("chat", 1, due_s=START_S + 1.0)
    run.outcomes["chat"] += [answered("chat", 0.0, 0.05), late_first]
    assert missed.update(run, START_S + 1.0) == 1
    run.outcomes["chat"].append(no_first)
    assert missed.update(run, START_S + 1.05) == 1  # it may still come in time
    assert missed.update(run, START_S + 1.2) == 2
    no_first.error, no_first.finished_s = "503: no", START_S + 1.3
    under_way = Outcome("chat", 2, due_s=START_S + 1.4, progress=[(START_S + 1.45, 1)])
    refused = Outcome("chat", 3, due_s=START_S + 1.4, error="429: no", finished_s=START_S + 1.41)
    run.outcomes["chat"] += [under_way, refused]
    assert missed.update(run, START_S + 9.0) == 3  # its first token was in time; the gaps are judged at its end
