"""What a worker shows of its scheduler: plain data for the heartbeat, the metrics and the simulator."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.step_time.cost import StepCost
from scheduler.control.explanation import TierOutputs
from scheduler.request_state import RequestState, Status


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Requests of one tier that the worker holds, by what they are doing."""

    waiting: int
    running: int
    paused: int
    swapped: int


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """The scheduler at one moment. Sums count from the start of the process."""

    kv_usage: float  # share of KV blocks in use
    kv_reserve_blocks: int  # KV blocks that bulk leaves free for interactive sequences
    step_cost: StepCost  # predicted, of a step with prefills
    knows_step_times: bool  # enough steps were observed to predict others
    step_time_error: float  # mean |measured / predicted - 1| of recent steps
    held: Mapping[str, TierCounts]  # by tier
    outputs: Mapping[str, TierOutputs]  # of the controller, by tier
    used_s: Mapping[str, float]  # engine time that was of use, by tier: a sum
    preemptions: Mapping[tuple[str, str], int]  # by (tier, mode): a sum
    recomputed_tokens: Mapping[str, int]  # by tier: a sum
    num_step_evictions: int  # steps that bulk was evicted from: a sum
    wasted_s: float  # engine time thrown away by these evictions: a sum


def count_by_status(states: Iterable[RequestState]) -> TierCounts:
    counts = Counter(state.status for state in states)
    return TierCounts(counts[Status.WAITING], counts[Status.RUNNING], counts[Status.PAUSED], counts[Status.SWAPPED])
