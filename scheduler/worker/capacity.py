"""What this worker can do for each tier, for its heartbeat: admission predicts waits from it.

Looks at all that is held, once a heartbeat. Costs are those of the step-time model, times its 95th percentile, so that
rates are what the engine keeps nearly always. Interactive prefills ride with the decodes of their own tier and of those
above; tiers without a promise have the time that those above leave, by what these used of late. While too few steps
were seen to judge by, a rate is not known (0): nobody is refused for a guess.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from engine.interface import EngineInfo
from engine.step_time.model import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import PREFILL_EXTRA_SHARE
from scheduler.deadlines import is_late
from scheduler.planning.status import CoreStatus
from scheduler.planning.step_report import Ended
from scheduler.registry.worker_status import TierCapacity
from scheduler.request_state import RequestState, Status

SMOOTHING = 0.1  # weight of the newest heartbeat in what is used a second
FORGETTING = 31 / 32  # a request's weight in the usual one, with each that ends after it
FIRST_PROMPT = 256  # tokens, while none has ended
ENOUGH_SEEN = 8  # requests, before it is said how long one stays
LEAST_SHARE = 0.02  # of the time is left to every tier, or it would never be heard of again


@dataclass(slots=True)
class _Seen:
    """Of one tier: the usual request, and how much of its tokens a second. Owner: `CapacityEstimator`."""

    num_ended: int = 0
    mean_prompt: float = 0.0
    mean_output: float = 0.0
    mean_held_s: float = 0.0
    used_share: float = 0.0  # of the engine's time, of late
    used_s: float = 0.0  # of it, ever

    def learn(self, ended: Sequence[Ended]) -> None:
        if ended:
            weight = 1 - FORGETTING ** len(ended) if self.num_ended else 1.0
            self.num_ended += len(ended)
            self.mean_prompt += weight * (fmean(e.prompt_tokens for e in ended) - self.mean_prompt)
            self.mean_output += weight * (fmean(e.output_tokens for e in ended) - self.mean_output)
            self.mean_held_s += weight * (fmean(e.held_s for e in ended) - self.mean_held_s)

    def smooth(self, used_s: float, interval_s: float) -> None:
        self.used_share += SMOOTHING * ((used_s - self.used_s) / interval_s - self.used_share)
        self.used_s = used_s


@dataclass(slots=True)
class _Held:
    """Of one tier and those above it, summed from the top."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_s: float = 0.0
    used: float = 0.0  # share of the engine's time, of late
    gap_s: float = NEVER_S  # the shortest that is promised to those that decode


class CapacityEstimator:
    """Owner of what was seen of each tier."""

    def __init__(self, engine: EngineInfo) -> None:
        self._max_step_tokens = engine.max_step_tokens
        self._seen: dict[str, _Seen] = {}
        self._ended: list[Ended] = []  # since the last heartbeat

    def enter(self, end: Ended) -> None:
        if end.reason != "failed":
            self._ended.append(end)

    def measure(
        self,
        tiers: Sequence[Tier],
        requests: Iterable[RequestState],
        status: CoreStatus,
        now: float,
        interval_s: float,
    ) -> dict[str, TierCapacity]:
        """By tier. `interval_s`: since the last time."""
        self._learn(tiers, status.used_s, interval_s)
        states = defaultdict(list)
        for state in requests:
            states[state.tier.name].append(state)
        cost, held, capacities = status.step_cost, _Held(), {}
        for tier in tiers:
            name, output = tier.name, status.outputs[tier.name]
            left = max(1 - held.used, tier.floor, LEAST_SHARE)
            self._add(held, states[name], tier, cost, output.margin, now)
            ages_s = [now - state.claimed_s for state in states[name]]
            capacity = self._capacity(tier, output.batch_size, ages_s, cost, held, left)
            capacities[name] = capacity if status.knows_step_times else replace(capacity, prefill_tokens_per_s=0.0)
        return capacities

    def _learn(self, tiers: Sequence[Tier], used_s: Mapping[str, float], interval_s: float) -> None:
        ended = defaultdict(list)
        for end in self._ended:
            ended[end.tier].append(end)
        self._ended.clear()
        for tier in tiers:
            seen = self._seen.setdefault(tier.name, _Seen())
            seen.learn(ended[tier.name])
            seen.smooth(used_s.get(tier.name, 0.0), interval_s)

    def _add(
        self,
        held: _Held,
        states: Sequence[RequestState],
        tier: Tier,
        cost: StepCost,
        margin: float,
        now: float,
    ) -> None:
        seen = self._seen[tier.name]
        decodes = [s for s in states if s.is_decode and s.status is Status.RUNNING]
        held.prompt_tokens += sum(s.num_uncomputed for s in states if not (s.is_decode or is_late(s, cost, now)))
        held.output_tokens += sum(s.request.sampling.max_tokens - len(s.output_token_ids) for s in states)
        held.decode_s += sum(cost.decode(s.num_computed_tokens) for s in decodes)
        if decodes and tier.slo.itl_p99_ms is not None:
            held.gap_s = min(held.gap_s, tier.slo.itl_p99_ms / 1000 * (1 - margin))
        held.used += seen.used_share

    def _capacity(
        self, tier: Tier, slots: int, ages_s: Sequence[float], cost: StepCost, held: _Held, left: float
    ) -> TierCapacity:
        seen = self._seen[tier.name]
        prompt_s, output_s = _prompt_token_s(seen, cost), _output_token_s(seen, cost, slots)
        filled_s = prompt_s + cost.step_s / self._max_step_tokens
        return TierCapacity(
            prompt_tokens=held.prompt_tokens,
            output_tokens=held.output_tokens,
            step_s=cost.step_s + held.decode_s,
            slots_free=slots - len(ages_s),
            drain_per_s=_per_s(slots, _stay_s(seen, ages_s)),
            prefill_tokens_per_s=self._riding(held, cost, prompt_s) if tier.is_interactive else _per_s(left, filled_s),
            output_tokens_per_s=_per_s(left, output_s),
        )

    def _riding(self, held: _Held, cost: StepCost, prompt_token_s: float) -> float:
        """Prompt tokens a second in steps that hold the decodes as well, and last no longer than these allow."""
        decodes_s = cost.step_s + held.decode_s
        room_s = max(held.gap_s - decodes_s, PREFILL_EXTRA_SHARE * decodes_s)
        full_s = self._max_step_tokens * prompt_token_s
        chunk = self._max_step_tokens * (room_s / full_s if full_s > room_s else 1.0)
        return _per_s(chunk, decodes_s + chunk * prompt_token_s)


def _prompt_token_s(seen: _Seen, cost: StepCost) -> float:
    """Of a prompt of the usual length, attention included: the same in whichever chunks."""
    return cost.prefill_token_s + cost.attend_s * (seen.mean_prompt or FIRST_PROMPT) / 2


def _output_token_s(seen: _Seen, cost: StepCost, batch: int) -> float:
    """In the middle of the usual answer, with its part of the fixed cost of a step of `batch`."""
    return cost.decode(int(seen.mean_prompt + seen.mean_output / 2)) + cost.step_s / batch


def _stay_s(seen: _Seen, ages_s: Sequence[float]) -> float:
    """How long a request keeps its slot: no shorter than those do that are here. 0: too few to say."""
    if seen.num_ended + len(ages_s) < ENOUGH_SEEN:
        return 0.0
    return max(seen.mean_held_s, fmean(ages_s) if ages_s else 0.0)


def _per_s(amount: float, seconds: float) -> float:
    """0: not known."""
    return amount / seconds if seconds > 0 else 0.0
