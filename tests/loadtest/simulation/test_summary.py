"""The figures of a run, from records made by hand."""

import math
from array import array
from typing import Any

import pytest

from loadtest.simulation.clients import UNFINISHED
from loadtest.simulation.observation import EngineRecord, Moment, MovedKnob, Observation, RequestRecord
from loadtest.simulation.report import simulation_sections
from loadtest.simulation.summary import meets_slo, spread, summarize
from scheduler.control.knobs import Decision
from tests.loadtest.simulation.builders import TTFT_S, make_card, make_tiers


def make_record(ttft_s: float | None = 0.1, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": "r",
        "traffic_class": "chat",
        "tier": "realtime",
        "arrived_s": 10.0,
        "prompt_tokens": 8,
        "deadline_s": None,
        "served_tier": "realtime",
        "first_token_s": None if ttft_s is None else 10.0 + ttft_s,
        "ended_s": None if ttft_s is None else 12.0,
        "gaps": 200,
    }
    return RequestRecord(**{**values, **changes})


def make_observation(*records: RequestRecord, **changes: Any) -> Observation:
    classes = {r.traffic_class: r.tier for r in records} or {"chat": "realtime"}
    engines = [EngineRecord(steps=10, busy_s=6.0, rows=40, planned_tokens=50, suspensions=3, dropped_steps=1)]
    return Observation(
        **{"duration_s": 10.0, "classes": classes, "requests": list(records), "engines": engines, **changes}
    )


def test_no_samples_have_no_quantile() -> None:
    assert spread([]).p99 is None and spread([]).count == 0


@pytest.mark.parametrize(
    ("record", "met"),
    [
        (make_record(), True),
        (make_record(TTFT_S + 0.01), False),
        (make_record(gaps_missed=2), True),
        (make_record(gaps_missed=3), False),
        (make_record(None, rejected="queue_full"), False),
        (make_record(None, failed=UNFINISHED), False),
        (make_record(tier="bulk"), None),
        (make_record(9.0, tier="bulk", deadline_s=3.0), True),
        (make_record(9.0, tier="bulk", deadline_s=1.0), False),
    ],
)
def test_requests_are_judged_by_their_tiers_slo(record: RequestRecord, met: bool | None) -> None:
    assert meets_slo(record, make_tiers()[record.tier]) is met


def test_a_refused_request_counts_as_offered_and_as_waiting_for_ever() -> None:
    records = [make_record() for _ in range(98)] + [make_record(None, rejected="queue_full") for _ in range(2)]
    summary = summarize(make_observation(*records), make_tiers())
    (chat,) = summary.classes
    assert (chat.offered, chat.admitted, chat.rejected, chat.done) == (100, 98, {"queue_full": 2}, 98)
    assert chat.attainment == pytest.approx(0.98)
    ttft = next(p for p in summary.slos if p.what == "TTFT p99")
    assert ttft.observed == math.inf and not ttft.is_kept and not summary.keeps_slos


def test_gaps_deadlines_and_demotions_are_judged() -> None:
    records = [
        make_record(served_tier="bulk"),
        make_record(tier="bulk", served_tier="bulk", traffic_class="job", deadline_s=1.0),
    ]
    gaps = {"chat": array("d", [0.01] * 90 + [9.0] * 10)}
    summary = summarize(make_observation(*records, gaps_s=gaps), make_tiers())
    assert [(p.what, p.is_kept) for p in summary.slos] == [
        ("TTFT p99", True),
        ("ITL p99", False),
        ("deadlines met", False),
    ]
    assert [c.demoted for c in summary.classes] == [1, 0]


def test_engines_and_moves_are_summed_up() -> None:
    moves = [
        MovedKnob(float(i), 0, Decision("bulk", "batch_size", old, new, "queue", "why"))
        for i, (old, new) in enumerate([(1, 2), (2, 4), (4, 3)])
    ]
    moments = [Moment(float(i), 0.5, 0.1, error, {}) for i, error in enumerate([0.02, 0.04])]
    summary = summarize(make_observation(moves=moves, moments=moments), make_tiers())
    engines = summary.engines
    assert (engines.busy_share, engines.sequences_per_step) == (0.6, 4.0)
    assert (engines.suspensions, engines.dropped_steps) == (3, 1)
    assert engines.predictor_error == pytest.approx(0.03)
    assert summary.moves == {("bulk", "batch_size", "queue"): (2, 1)}


def test_cached_tokens_are_counted_of_the_prompts_that_were_computed() -> None:
    records = [make_record(cached_tokens=6), make_record(), make_record(None, rejected="queue_full")]
    observation = make_observation(*records)
    (chat,) = summarize(observation, make_tiers()).classes
    assert chat.cached_share == 6 / 16
    (section, *_) = simulation_sections(summarize(observation, make_tiers()), make_card())
    assert section.notes[-1] == "chat: 37.5 % of the prompt tokens from prefix caches"
