"""Jobs with windows beside chat, in virtual time: with deadlines they end in time, as best effort many do not."""

import pytest

from bench.batch_deadlines.command import Plan, Row, measure, record_of
from bench.batch_deadlines.hindsight import KnownJob, late, wrongly_refused
from loadtest.simulation.cost_card import load_cost_card
from loadtest.simulation.experiment import find_tiers


@pytest.mark.timeout(400)  # 20 s of a core
def test_jobs_end_in_time_where_best_effort_misses_and_chat_keeps_its_slo() -> None:
    tiers = find_tiers("")
    plan = Plan(
        tiers,
        load_cost_card("135m-cpu"),
        duration_s=330.0,
        jobs=4,
        windows_s=(120,),
        lines=(250, 500),
        large_lines=5000,
    )
    kept, best_effort = measure(plan, keeps_deadlines=True), measure(plan, keeps_deadlines=False)
    assert (kept.admitted, kept.missed_share) == (4, 0.0)
    assert best_effort.missed_share >= 0.2
    slo = tiers[tiers.default_tier].slo
    assert kept.chat_first_tokens_in_time >= 0.99
    assert kept.chat_itl_p99_s is not None and 1000 * kept.chat_itl_p99_s <= (slo.itl_p99_ms or 0)
    assert kept.large_job_lines > 0


def test_jobs_that_certainly_cannot_end_are_refused() -> None:
    plan = Plan(
        find_tiers(""),
        load_cost_card("135m-cpu"),
        duration_s=100.0,
        chats_per_s=0.1,
        jobs=1,
        windows_s=(60,),
        lines=(5000, 5000),
        large_lines=32,
    )
    row = measure(plan, keeps_deadlines=True)
    assert (row.admitted, row.refused, row.missed_share) == (0, 1, 0.0)


def test_the_table_has_a_row_for_each_arm() -> None:
    rows = [Row(arm, 16, 15, 0, 0, 100, 1.0, 0.1, 0.09) for arm in ("deadlines", "best effort")]
    [section] = record_of({1: rows}).sections
    assert section.table is not None
    assert [row.cells[:5] for row in section.table.rows] == [(row.arm, "16", "0", "0", "93.8 %") for row in rows]


def known(at_s: float, due_s: float, work_s: float, admitted: bool = True) -> KnownJob:
    return KnownJob(at_s, due_s, work_s, admitted)


def test_a_refusal_is_wrong_if_the_job_and_those_before_it_would_have_ended_in_time() -> None:
    left = [0.5] * 100  # 50 seconds of the engine
    assert wrongly_refused([known(0, 50, 24, False)], left) == 1
    assert wrongly_refused([known(0, 50, 26, False)], left) == 0
    assert wrongly_refused([known(0, 100, 20), known(1, 60, 25, False)], left) == 1, "the first one has time to wait"
    assert wrongly_refused([known(0, 52, 20), known(1, 60, 25, False)], left) == 0
    assert wrongly_refused([known(1, 60, 25, False), known(2, 52, 20)], left) == 1, "later ones do not count"


def test_the_job_that_is_due_first_gets_all_that_is_left() -> None:
    assert late([known(0, 20, 8), known(0, 10, 5), known(5, 30, 2)], [0.5] * 30) == 1
    assert late([known(0, 20, 5), known(0, 10, 5), known(5, 30, 2)], [0.5] * 30) == 0
