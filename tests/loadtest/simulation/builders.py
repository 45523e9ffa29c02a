"""What the simulator's tests are built from: a card of round figures, small loads, and the laws of every run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from loadtest.simulation.cost_card import CostCard
from loadtest.simulation.deployment import Setting
from loadtest.simulation.observation import Observation, RequestRecord
from loadtest.simulation.run import simulate
from loadtest.simulation.traffic import OfferedRequest, Traffic, scenario_traffic
from loadtest.traffic.scenario import Scenario
from scheduler.config import TierSet, parse_tiers
from tests.scheduler.builders import tiers_document

COEFFICIENTS = {
    "step_s": 0.02,
    "prefill_token_s": 0.0005,
    "attend_s": 1e-8,
    "context_token_s": 1e-6,
    "decode_s": 0.001,
}
TTFT_S, ITL_S = 0.5, 0.15


def make_card(**changes: Any) -> CostCard:
    """Decode steps of 20 ms and 1 ms a sequence; a prompt token takes half a millisecond."""
    values: dict[str, Any] = {
        "name": "test",
        "measured_on": "nowhere",
        "decode": COEFFICIENTS,
        "mixed": COEFFICIENTS,
        "noise": 0.03,
        "num_blocks": 4000,
        "block_size": 16,
        "max_step_tokens": 1024,
        "max_model_len": 4096,
        "suspends_steps": True,
    }
    return CostCard.model_validate({**values, **changes})


_TIERS: dict[str, dict[str, Any]] = {
    "realtime": {
        "priority": 100,
        "service_tiers": ["default"],
        "slo": {"ttft_p99_ms": 1000 * TTFT_S, "itl_p99_ms": 1000 * ITL_S},
        "max_wait_ms": {"min": 0, "start": 0, "max": 20},
        "batch_size": {"min": 4, "start": 32, "max": 64},
        "queue_limit": 500,
    },
    "bulk": {
        "priority": 10,
        "service_tiers": ["flex"],
        "max_wait_ms": {"min": 0, "start": 0, "max": 500},
        "batch_size": {"min": 1, "start": 24, "max": 64},
        "floor": 0.05,
        "deadline_ms": 600_000,
    },
}


def make_tiers(controller: dict[str, bool] | None = None, **changes: dict[str, Any]) -> TierSet:
    """Chat with an SLO over bulk with a min share."""
    return parse_tiers(tiers_document(_TIERS, changes, batch_tier="bulk", controller=controller or {}))


def make_scenario(rate_per_s: float = 2.0, streams: int = 32, **more: Any) -> Scenario:
    """Short chats; `streams` of bulk without end. `more` are keys of the chats' arrivals: cycle, spikes, cv."""
    chat = {
        "role": "interactive",
        "service_tier": "default",
        "arrivals": {"rate_per_s": rate_per_s, **more},
        "prompt_tokens": {"min": 32, "max": 128},
        "output_tokens": {"min": 8, "max": 24},
    }
    bulk = {
        "role": "bulk",
        "service_tier": "flex",
        "arrivals": {"streams": streams},
        "prompt_tokens": {"min": 64, "max": 192},
        "output_tokens": {"min": 32, "max": 96},
    }
    return Scenario.model_validate({"classes": {"chat": chat, "bulk": bulk}})


def run_scenario(
    scenario: Scenario,
    duration_s: float,
    *,
    tiers: TierSet | None = None,
    card: CostCard | None = None,
    seed: int = 1,
    drift: Callable[[float], float] | None = None,
    alter: Callable[[Traffic], Traffic] = lambda traffic: traffic,
    drain_s: float = 60.0,
) -> Observation:
    """Simulate, and check the laws that hold of any run."""
    tiers = tiers or make_tiers()
    traffic = alter(scenario_traffic(scenario, tiers, duration_s, seed))
    setting = Setting(tiers, card or make_card(), seed=seed, drift=drift)
    observation = simulate(setting, traffic, duration_s, drain_s=drain_s)
    check_laws(observation, tiers)
    return observation


def check_laws(observation: Observation, tiers: TierSet) -> None:
    """Check that nothing is lost, nothing happens before its cause, and every knob stays within its bounds."""
    for record in observation.requests:
        ends = (bool(record.rejected), record.is_done, bool(record.failed))
        assert sum(ends) == 1, f"conservation: {record}"
        if record.is_done:
            assert record.first_token_s is not None and record.ended_s is not None
            assert record.arrived_s <= record.first_token_s <= record.ended_s, f"causality: {record}"
    for move in observation.moves:
        knob, tier = move.decision.knob, tiers[move.decision.tier]
        bounds = getattr(tier, knob, None)
        if bounds is not None:
            assert bounds.min <= move.decision.new <= bounds.max, move
    for moment in observation.moments:
        assert moment.kv_usage <= 1.0
        for name, seen in moment.tiers.items():
            assert tiers[name].batch_size.min <= seen.batch_size <= tiers[name].batch_size.max
            assert tiers[name].max_wait_ms.min <= 1000 * seen.max_wait_s <= tiers[name].max_wait_ms.max


def chats(
    observation: Observation, from_s: float = 0.0, to_s: float = float("inf"), name: str = "chat"
) -> list[RequestRecord]:
    """Return the requests of a class that arrived in between."""
    return [r for r in observation.requests if r.traffic_class == name and from_s <= r.arrived_s < to_s]


def share_in_time(records: Sequence[RequestRecord], target_s: float = TTFT_S) -> float:
    """Return the share of all offered requests whose first token came in time."""
    assert records, "nothing was offered then"
    return sum(r.ttft_s is not None and r.ttft_s <= target_s for r in records) / len(records)


def add(*requests: OfferedRequest) -> Callable[[Traffic], Traffic]:
    """Return a function that adds these requests to the traffic."""

    def alter(traffic: Traffic) -> Traffic:
        arrivals = sorted([*traffic.arrivals, *requests], key=lambda r: r.at_s)
        return replace(
            traffic, classes={**traffic.classes, **{r.traffic_class: r.tier for r in requests}}, arrivals=arrivals
        )

    return alter


def tokens_ended(observation: Observation, name: str, from_s: float, to_s: float) -> int:
    """Return the output tokens of requests that ended in between."""
    ended = [r for r in observation.requests if r.traffic_class == name and r.is_done and r.ended_s is not None]
    return sum(r.output_tokens for r in ended if r.ended_s is not None and from_s <= r.ended_s < to_s)
