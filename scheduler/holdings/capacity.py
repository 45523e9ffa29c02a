"""Estimates of a worker's capacity for each tier. The heartbeat sends them, and admission predicts waits from them.

They are computed at each heartbeat, from all requests that the worker holds. Costs come from the step-time model with
its safety factor (the 95th percentile), so that the engine nearly always reaches the rates. Interactive prefills run in
steps with the decodes of their own tier and of the tiers above. Tiers without an SLO get the share of engine time that
the tiers above have recently left, but at least their min share. A rate of 0 means that the rate is not known yet,
because too few steps or requests were seen: no request is refused because of a guess.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean

from engine.interface import EngineInfo
from engine.step_time.cost import StepCost
from engine.step_time.ewma import Ewma
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.deadlines import is_too_long
from scheduler.holdings.report import Ended
from scheduler.holdings.status import CoreStatus
from scheduler.registry.worker_status import LEFT_STRETCHES_S, TierCapacity
from scheduler.request_state import RequestState, Status

# Weight of the newest heartbeat in the average share of engine time that a tier uses: about the last ten seconds.
USED_SHARE_WEIGHT = 0.1
# Weight of each ended request in the averages over ended requests. They are as steady as means of 63 requests.
ENDED_WEIGHT = 1 / 32
# The smallest share of the time that counts as left to a tier without a min share. A share of 0 would be a rate of 0,
# which means that the rate is not known.
MIN_SHARE_LEFT = 0.02
INTERVAL_S = 10.0  # seconds that are summed up before they count
MAX_INTERVALS = int(LEFT_STRETCHES_S[-1] / INTERVAL_S)


@dataclass(slots=True)
class _TierHistory:
    """The averages over one tier's ended requests, and its use of the engine. Only `CapacityEstimator` changes it."""

    num_ended: int = 0
    prompt_tokens: Ewma = field(default_factory=lambda: Ewma(ENDED_WEIGHT))
    computed_tokens: Ewma = field(default_factory=lambda: Ewma(ENDED_WEIGHT))  # prompt tokens that were not cached
    output_tokens: Ewma = field(default_factory=lambda: Ewma(ENDED_WEIGHT))
    max_tokens: Ewma = field(default_factory=lambda: Ewma(ENDED_WEIGHT))
    used_share: Ewma = field(default_factory=lambda: Ewma(USED_SHARE_WEIGHT))  # share of the engine's time
    used_s: float = 0.0  # seconds of engine time since the start

    def add_ended(self, ended: Sequence[Ended]) -> None:
        """Update the averages with requests that ended.

        The mean of `ended` is added once, with the total weight that its requests would have if they were added one
        after the other. The first requests replace the initial values.
        """
        if ended:
            weight = 1 - (1 - ENDED_WEIGHT) ** len(ended) if self.num_ended else 1.0
            self.num_ended += len(ended)
            self.prompt_tokens.add(fmean(e.prompt_tokens for e in ended), weight)
            self.computed_tokens.add(fmean(e.prompt_tokens - e.cached_tokens for e in ended), weight)
            self.output_tokens.add(fmean(e.output_tokens for e in ended), weight)
            self.max_tokens.add(fmean(e.max_tokens for e in ended), weight)

    def add_used(self, used_s: float, interval_s: float) -> None:
        """Update the share of engine time that the tier uses.

        `used_s` is the tier's engine time since the start; `interval_s` is the number of seconds since the last call.
        """
        self.used_share.add((used_s - self.used_s) / interval_s)
        self.used_s = used_s


@dataclass(slots=True)
class _Backlog:
    """The work of one tier and of all tiers above it. Tiers are added from the highest to the lowest."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_s: float = 0.0  # predicted seconds for one token of each decode
    used_share: float = 0.0  # recent share of the engine's time
    itl_s: float = NEVER_S  # the shortest ITL SLO among the decodes, less the controller's margin


class CapacityEstimator:
    """Estimates how much work of each tier the worker can do. Owns the history of the tiers."""

    def __init__(self, engine: EngineInfo) -> None:
        self._max_step_tokens = engine.max_step_tokens
        self._history: dict[str, _TierHistory] = {}
        self._ended: list[Ended] = []  # requests that ended since the last heartbeat

    def note_ended(self, end: Ended) -> None:
        if end.reason != "failed":
            self._ended.append(end)

    def measure(
        self,
        tiers: Sequence[Tier],
        requests: Iterable[RequestState],
        status: CoreStatus,
        interval_s: float,
    ) -> dict[str, TierCapacity]:
        """Return the capacity for each tier, by name.

        `tiers` are sorted from the highest to the lowest priority. `requests` are all requests that the worker holds.
        `interval_s` is the number of seconds since the last call.
        """
        self._update_history(tiers, status.used_s, interval_s)
        states = defaultdict(list)
        for state in requests:
            states[state.tier.name].append(state)
        cost, backlog, capacities = status.step_cost, _Backlog(), {}
        for tier in tiers:
            name, output = tier.name, status.outputs[tier.name]
            share_left = max(1 - backlog.used_share, tier.min_share, MIN_SHARE_LEFT)
            self._add_to(backlog, states[name], tier, cost, output.margin)
            capacity = self._capacity(tier, output.batch_size, states[name], status, backlog, share_left)
            capacities[name] = capacity if status.knows_step_times else replace(capacity, prefill_tokens_per_s=0.0)
        return capacities

    def _update_history(self, tiers: Sequence[Tier], used_s: Mapping[str, float], interval_s: float) -> None:
        ended = defaultdict(list)
        for end in self._ended:
            ended[end.tier].append(end)
        self._ended.clear()
        for tier in tiers:
            history = self._history.setdefault(tier.name, _TierHistory())
            history.add_ended(ended[tier.name])
            history.add_used(used_s.get(tier.name, 0.0), interval_s)

    def _add_to(
        self,
        backlog: _Backlog,
        states: Sequence[RequestState],
        tier: Tier,
        cost: StepCost,
        margin: float,
    ) -> None:
        """Add a tier's requests to `backlog`, without the prompts that newer requests pass."""
        decodes = [s for s in states if s.is_decode and s.status is Status.RUNNING]
        backlog.prompt_tokens += sum(s.num_uncomputed for s in states if not (s.is_decode or is_too_long(s, cost)))
        backlog.output_tokens += sum(s.request.sampling.max_tokens - len(s.output_token_ids) for s in states)
        backlog.decode_s += sum(cost.decode(s.num_computed_tokens) for s in decodes)
        if decodes and tier.slo.itl_p99_ms is not None:
            backlog.itl_s = min(backlog.itl_s, tier.slo.itl_p99_ms / 1000 * (1 - margin))
        backlog.used_share += self._history[tier.name].used_share.value

    def _capacity(
        self,
        tier: Tier,
        slots: int,
        states: Sequence[RequestState],
        status: CoreStatus,
        backlog: _Backlog,
        share_left: float,
    ) -> TierCapacity:
        history, cost = self._history[tier.name], status.step_cost
        decode_cost = status.decode_cost or cost  # bulk decodes mostly in steps without prefills
        prompt_s, output_s = _prompt_token_s(history, cost), _output_token_s(history, cost, slots)
        in_full_steps_s = prompt_s + cost.step_s / self._max_step_tokens
        prefill_per_s = (
            self._prefill_beside_decodes_per_s(backlog, cost, prompt_s)
            if tier.is_interactive
            else _per_s(share_left, in_full_steps_s)
        )
        return TierCapacity(
            prompt_tokens=backlog.prompt_tokens,
            output_tokens=backlog.output_tokens,
            step_s=cost.step_s + backlog.decode_s,
            slots_free=slots - len(states),
            drain_per_s=_per_s(share_left, _request_s(history, states, prompt_s, output_s)),
            prefill_tokens_per_s=prefill_per_s,
            output_tokens_per_s=_per_s(share_left, output_s),
            # The rates of a tier that has the whole engine, at mean costs.
            whole_prefill_tokens_per_s=status.safety * _per_s(1.0, in_full_steps_s),
            whole_output_tokens_per_s=status.safety
            * _per_s(1.0, _output_token_s(history, decode_cost, tier.batch_size.max)),
            num_ended=history.num_ended,
            used_share=max(0.0, history.used_share.value),
        )

    def _prefill_beside_decodes_per_s(self, backlog: _Backlog, cost: StepCost, prompt_token_s: float) -> float:
        """Return the prompt tokens per second in steps that also hold the decodes.

        Such a step lasts as long as the ITL SLO of the decodes allows. If the SLO leaves less than half of the step for
        prefill, first tokens are late soon, and the prefill gets half of the step.
        """
        decodes_s = cost.step_s + backlog.decode_s
        room_s = max(backlog.itl_s - decodes_s, decodes_s)
        full_s = self._max_step_tokens * prompt_token_s
        chunk = self._max_step_tokens * (room_s / full_s if full_s > room_s else 1.0)
        return _per_s(chunk, decodes_s + chunk * prompt_token_s)


def _prompt_token_s(history: _TierHistory, cost: StepCost) -> float:
    """Return the seconds per token of an average prompt, attention included. They are the same for every chunk size."""
    return cost.prefill_token_s + cost.attend_s * history.prompt_tokens.value / 2


def _output_token_s(history: _TierHistory, cost: StepCost, batch: int) -> float:
    """Return the seconds per output token in the middle of an average answer.

    The time includes the token's part of the fixed cost of a step with `batch` sequences.
    """
    context = int(history.prompt_tokens.value + history.output_tokens.value / 2)
    return cost.decode(context) + cost.step_s / batch


def _request_s(
    history: _TierHistory, states: Sequence[RequestState], prompt_token_s: float, output_token_s: float
) -> float:
    """Return the engine time of an average request while all slots are in use; 0 if no output is known.

    Its output is that of ended requests, in proportion to `max_tokens`: those that are held may be of another kind.
    Until a request has ended, the requests that the worker decodes now stand for ended ones.
    """
    computed_tokens, output_tokens = history.computed_tokens.value, history.output_tokens.value
    decodes = [s for s in states if s.is_decode]
    if not history.num_ended and decodes:
        computed_tokens = fmean(len(s.request.prompt_token_ids) - (s.num_cached_tokens or 0) for s in decodes)
        output_tokens = fmean(len(s.output_token_ids) for s in decodes)
    elif states and history.max_tokens.value:
        output_tokens *= fmean(s.request.sampling.max_tokens for s in states) / history.max_tokens.value
    return computed_tokens * prompt_token_s + output_tokens * output_token_s if output_tokens else 0.0


def _per_s(amount: float, seconds: float) -> float:
    """Return the rate `amount` ÷ `seconds`; 0 (not known) if `seconds` is 0."""
    return amount / seconds if seconds > 0 else 0.0


class SpareShare:
    """The share of the engine that interactive tiers leave to urgent bulk, over the last hour, and what they take now.

    Windows of batches are promised by it. Interactive load comes in bursts, so a mean over seconds says little, and a
    long mean hides a busy time that a short window may meet. So `shares` has the busiest stretch of each of the lengths
    `LEFT_STRETCHES_S`; it is empty at first.
    """

    def __init__(self) -> None:
        self.shares: tuple[float, ...] = ()
        self._recent: Ewma | None = None  # share of interactive tiers; None: not known
        self._seen_s = 0.0  # engine time of interactive tiers until the last call
        self._taken: deque[float] = deque(maxlen=MAX_INTERVALS)  # share of interactive tiers, by interval
        self._total_s = 0.0  # engine time of interactive tiers at the begin of the present interval
        self._elapsed_s = 0.0  # length of the present interval

    def add(self, interactive_s: float, interval_s: float) -> None:
        """Note the engine time of interactive tiers since the start, `interval_s` seconds after the last call."""
        self._recent = self._recent or Ewma(USED_SHARE_WEIGHT)
        self._recent.add((interactive_s - self._seen_s) / interval_s)
        self._seen_s = interactive_s
        self._elapsed_s += interval_s
        if self._elapsed_s < INTERVAL_S:
            return
        self._taken.append(min(1.0, (interactive_s - self._total_s) / self._elapsed_s))
        self._total_s, self._elapsed_s = interactive_s, 0.0
        left = (1 - max(self._means(int(stretch_s / INTERVAL_S))) for stretch_s in LEFT_STRETCHES_S)
        self.shares = tuple(accumulate(left, max))  # a longer stretch consists of shorter ones, except for its end

    @property
    def recent(self) -> float | None:
        """The share that interactive tiers took in about the last ten seconds; None: not known."""
        return None if self._recent is None else self._recent.value

    def _means(self, length: int) -> Iterator[float]:
        """Yield the mean share of each stretch of `length` intervals, or of all if there are fewer."""
        length = min(length, len(self._taken))
        sums = list(accumulate(self._taken, initial=0.0))
        for end in range(length, len(sums)):
            yield (sums[end] - sums[end - length]) / length
