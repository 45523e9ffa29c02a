"""The controller against loads that are hard for controllers, in virtual time: each test says what must happen, for any
seed.

The tests do not know how the controller decides. Every load is also run with a part of the controller switched off, or
without a min share, and then the test must complain about what suffers: this shows that the bounds are tight.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtest.simulation.observation import Observation
from loadtest.simulation.traffic import OfferedRequest
from scheduler.config import TierSet
from tests.loadtest.simulation.builders import (
    ITL_S,
    add,
    chats,
    make_card,
    make_scenario,
    make_tiers,
    run_scenario,
    share_in_time,
    tokens_ended,
)

# `TIDEGATE_SIMULATED_SEEDS=3,4,5` tries others.
SEEDS = tuple(int(seed) for seed in os.environ.get("TIDEGATE_SIMULATED_SEEDS", "").split(",") if seed) or (1,)
FROZEN = {"feed_forward": False, "feedback": False, "suspend": False}
AIMD_ONLY = {"feed_forward": False, "feedback": True, "suspend": False}
ALONE_PER_S = 9.0  # about the chats a second that the test card serves with nothing beside them
SLOW = {"step_s": 0.03, "prefill_token_s": 0.0005, "attend_s": 0.0, "context_token_s": 0.0, "decode_s": 0.004}
GAPS = "gaps"  # between tokens, too many of them too long


@dataclass
class Verdict:
    """What was wrong in one run."""

    observation: Observation
    complaints: set[str] = field(default_factory=set)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.complaints.add(otherwise)

    def in_time(self, share: float, otherwise: str, from_s: float = 0.0, to_s: float = float("inf")) -> None:
        """Check that this share of the chats that arrived in between got their first token in time."""
        self.expect(share_in_time(chats(self.observation, from_s, to_s)) >= share, otherwise)

    def smooth(self) -> None:
        gaps = self.observation.gaps_s["chat"]
        self.expect(sum(gap <= ITL_S for gap in gaps) >= 0.99 * len(gaps), GAPS)

    def bulk_per_s(self, from_s: float, to_s: float) -> float:
        return tokens_ended(self.observation, "bulk", from_s, to_s) / (to_s - from_s)

    def busy(self, share: float, from_s: float, to_s: float) -> None:
        shares = [m.busy_share for m in self.observation.moments if from_s < m.at_s <= to_s]
        self.expect(sum(shares) >= share * len(shares), "the engine idles beside a backlog")


def square_pulse(seed: int, tiers: TierSet) -> Verdict:
    """Fifteen seconds of more chats than the engine carries. Soon after them, everything is as before."""
    scenario = make_scenario(rate_per_s=2.0, spikes=[{"at_s": 20, "for_s": 15, "factor": 6}])
    seen = Verdict(run_scenario(scenario, 65.0, seed=seed, tiers=tiers))
    seen.in_time(0.97, "before", 0, 20)
    seen.in_time(0.72, "in the pulse", 20, 35)
    seen.in_time(0.95, "behind it", 45)
    seen.smooth()
    seen.expect(seen.bulk_per_s(50, 65) >= 0.7 * seen.bulk_per_s(5, 20), "bulk is still held down")
    seen.expect(seen.bulk_per_s(20, 40) > 0, "the min share")
    return seen


def impulse(seed: int, tiers: TierSet) -> Verdict:
    """One second of 22 times the rate."""
    scenario = make_scenario(rate_per_s=1.0, spikes=[{"at_s": 10, "for_s": 1, "factor": 22}])
    seen = Verdict(run_scenario(scenario, 35.0, seed=seed, tiers=tiers))
    assert len(chats(seen.observation, 10, 11)) >= 15
    seen.in_time(0.95, "before", 0, 10)
    seen.in_time(0.95, "behind it", 15)
    seen.smooth()
    seen.expect(seen.bulk_per_s(20, 35) > 0, "bulk")
    return seen


def threefold_step(seed: int, tiers: TierSet) -> Verdict:
    """To 2.5 chats a second, which is about what an engine with slow decodes carries beside some bulk."""
    scenario = make_scenario(rate_per_s=2.5 / 3, streams=60, spikes=[{"at_s": 20, "for_s": 60, "factor": 3}])
    card = make_card(decode=SLOW, mixed=SLOW)
    seen = Verdict(run_scenario(scenario, 50.0, seed=seed, tiers=tiers, card=card))
    seen.in_time(0.95, "settling", 20, 30)
    seen.in_time(0.97, "settled", 30)
    seen.smooth()
    seen.expect(seen.bulk_per_s(35, 50) > 0, "bulk")
    return seen


def _drift(seed: int, tiers: TierSet, factor: float) -> Verdict:
    drift = lambda at_s: factor if at_s >= 15 else 1.0  # noqa: E731
    seen = Verdict(run_scenario(make_scenario(), 40.0, seed=seed, tiers=tiers, drift=drift))
    errors = [m.predictor_error for m in seen.observation.moments if m.at_s > 30]
    seen.expect(sum(errors) <= 0.10 * len(errors), "step times are not learned")
    seen.in_time(0.95, "behind it", 22)
    seen.smooth()
    seen.busy(0.9, 25, 40)
    return seen


def slower_steps(seed: int, tiers: TierSet) -> Verdict:
    return _drift(seed, tiers, 1.3)


def faster_steps(seed: int, tiers: TierSet) -> Verdict:
    return _drift(seed, tiers, 0.7)


def hardly_anything(seed: int, tiers: TierSet) -> Verdict:
    """A chat in ten seconds: too few for a p99, and bulk gets nearly all of the time."""
    seen = Verdict(run_scenario(make_scenario(rate_per_s=0.1), 45.0, seed=seed, tiers=tiers))
    seen.in_time(1.0, "few as they are")
    seen.smooth()
    start = tiers["bulk"].batch_size.start
    seen.expect(seen.observation.moments[-1].tiers["bulk"].batch_size >= start, "a knob runs away")
    seen.busy(0.95, 5, 45)
    return seen


def scarce_kv(seed: int, tiers: TierSet) -> Verdict:
    """KV memory for some ten sequences: it costs bulk, and no request is lost."""
    card = make_card(num_blocks=160)
    seen = Verdict(run_scenario(make_scenario(rate_per_s=2.0), 30.0, seed=seed, tiers=tiers, card=card, drain_s=30))
    assert max(m.kv_usage for m in seen.observation.moments) > 0.8, "it was scarce"
    seen.in_time(0.97, "chats")
    seen.smooth()
    seen.expect(seen.bulk_per_s(0, 30) > 0, "bulk")
    engines = seen.observation.engines
    lost, planned = sum(e.lost_tokens for e in engines), sum(e.planned_tokens for e in engines)
    seen.expect(lost <= 0.07 * planned, "evicted again and again")
    return seen


def _poison(seed: int, tiers: TierSet, tier: str) -> Verdict:
    """32k tokens after ten seconds: 17 seconds of prefill."""
    card = make_card(max_model_len=40_000)
    poison = OfferedRequest("poison", "poison", tier, 10.0, (7,) * 32_000, 8, 1)
    scenario = make_scenario(rate_per_s=1.5)
    seen = Verdict(
        run_scenario(scenario, 50.0, seed=seed, tiers=tiers, card=card, alter=add(poison), drain_s=120),
    )
    (record,) = chats(seen.observation, name="poison")
    seen.expect(record.is_done or (tier == "realtime" and bool(record.rejected)), "it gets no answer")
    seen.in_time(0.95, "chats")
    seen.smooth()
    return seen


def poison_of_bulk(seed: int, tiers: TierSet) -> Verdict:
    return _poison(seed, tiers, "bulk")


def poison_among_chats(seed: int, tiers: TierSet) -> Verdict:
    """A prompt of 32k tokens cannot be in time, so it waits for the chats that can, and they do not wait for it."""
    return _poison(seed, tiers, "realtime")


Load = Callable[[int, TierSet], Verdict]

# What a controller without feed-forward, feedback and mid-step eviction does to them.
LOADS: dict[Load, set[str]] = {
    square_pulse: {GAPS},
    impulse: {GAPS},
    threefold_step: {GAPS},
    slower_steps: {GAPS},
    faster_steps: {GAPS},
    hardly_anything: {GAPS},
    scarce_kv: {"evicted again and again", GAPS},
    poison_of_bulk: {"chats", GAPS},
    poison_among_chats: {"chats", GAPS},
}


def name_of(load: Load) -> str:
    return load.__name__


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", LOADS, ids=name_of)
def test_what_must_come_of_a_load_does(load: Load, seed: int) -> None:
    assert load(seed, make_tiers()).complaints == set()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", LOADS, ids=name_of)
def test_with_the_controller_switched_off_it_does_not(load: Load, seed: int) -> None:
    assert load(seed, make_tiers(FROZEN)).complaints >= LOADS[load]


@pytest.mark.parametrize("seed", SEEDS)
def test_feedback_alone_does_not_carry_a_threefold_step(seed: int) -> None:
    """Feedback learns of late gaps only after they were late."""
    assert GAPS in threefold_step(seed, make_tiers(AIMD_ONLY)).complaints


def bulk_under_a_flood(seed: int, min_share: float) -> float:
    """Twice as many chats as fit. Return the bulk tokens per second ÷ those of bulk alone."""
    realtime: dict[str, Any] = {"admission": {"patience_ms": None}, "queue_limit": 2000}
    tiers = make_tiers(bulk={"floor": min_share}, realtime=realtime)
    flood = make_scenario(rate_per_s=2 * ALONE_PER_S)
    flooded = Verdict(run_scenario(flood, 40.0, seed=seed, tiers=tiers, drain_s=0))
    alone = Verdict(run_scenario(make_scenario(rate_per_s=0.001), 10.0, seed=seed, tiers=tiers, drain_s=0))
    return flooded.bulk_per_s(10, 40) / alone.bulk_per_s(4, 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_under_a_flood_bulk_keeps_its_min_share_and_gets_nothing_without_one(seed: int) -> None:
    assert bulk_under_a_flood(seed, min_share=0.2) >= 0.15
    assert bulk_under_a_flood(seed, min_share=0.0) < 0.05
