"""The status of a worker's scheduler: plain data for the heartbeat, the metrics and the simulator."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.step_time.cost import StepCost
from scheduler.control.explanation import TierOutputs
from scheduler.control.slowdown import Slowdown
from scheduler.request_state import RequestState, Status


@dataclass(frozen=True, slots=True)
class TierCounts:
    """The number of requests of one tier that the worker holds in each status."""

    waiting: int
    running: int
    paused: int
    swapped: int


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """A snapshot of the scheduler. Fields marked as sums count from the start of the process."""

    step_cost: StepCost  # predicted costs in a step with prefills
    knows_step_times: bool  # whether enough steps were observed to predict step times
    step_time_error: float  # mean |predicted ÷ measured − 1| of recent steps
    held: Mapping[str, TierCounts]  # requests that the worker holds, by tier
    outputs: Mapping[str, TierOutputs]  # the controller's report, by tier
    used_s: Mapping[str, float]  # sum: engine time by tier, without work thrown away
    restored_tokens: Mapping[str, int]  # sum: output tokens that claimed requests had from earlier workers, by tier
    missing_deadlines: Mapping[str, int]  # bulk requests that cannot end by their deadlines any more, by tier
    safety: float = 1.0  # the factor by which predicted costs are above the mean
    decode_cost: StepCost | None = None  # predicted costs in a step without prefills; None: as `step_cost`
    kv_usage: float = 0.0  # share of KV blocks in use
    kv_reserve_blocks: int = 0  # KV blocks that bulk leaves free for interactive sequences
    preemptions: Mapping[tuple[str, str], int] = field(default_factory=dict)  # sum: number by (tier, mode)
    recomputed_tokens: Mapping[str, int] = field(default_factory=dict)  # sum: tokens whose KV was lost, by tier
    num_suspensions: int = 0  # sum: how often a step was suspended for interactive requests
    wasted_s: float = 0.0  # sum: engine time of suspended steps that were dropped
    # Sum: engine time that interactive tiers take from urgent bulk; None: not known, as the steps are a server's own.
    interactive_s: float | None = None
    # What slots without bulk show, by tier and kind of latency ("ttft" or "e2e"). None: there is too little data.
    slowdowns: Mapping[tuple[str, str], Slowdown | None] = field(default_factory=dict)


def count_by_status(states: Iterable[RequestState]) -> TierCounts:
    counts = Counter(state.status for state in states)
    return TierCounts(counts[Status.WAITING], counts[Status.RUNNING], counts[Status.PAUSED], counts[Status.SWAPPED])
