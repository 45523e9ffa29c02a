"""Budgets: how much each tier may do in a step. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.control.step_limit import StepLimit

# Share of all KV blocks that a bulk sequence leaves free when it starts: what starts without it is soon preempted. As
# long as less is free, bulk's batch size shrinks.
KV_RESERVE = 0.25
ALONE_KV_RESERVE = 0.1  # the same while no interactive request comes: for the growth of what runs; no size shrinks


@dataclass(frozen=True, slots=True)
class TierBudget:
    """The limits of one tier's work in the next step."""

    max_num_seqs: int
    max_tokens: int = 1 << 30
    max_wait_s: float = 0.0  # the longest time that a new request may wait for other requests to share its first step
    arrival_gap_s: float = NEVER_S  # mean time between two arrivals
    limit: StepLimit = StepLimit()  # the longest time that the step may take with work of this tier
    added_s: float = NEVER_S  # the time that bulk may add to the interactive part of the step, up to `limit`
    alone_s: float = NEVER_S  # the time of a step with bulk if no interactive request can run in it
    beside_s: float = NEVER_S  # the most that bulk may add to any other step
    overloaded: bool = False  # first tokens come much too late: prefills run in order, whether they are late or not
    min_share: float = 0.0  # the tier's min share, if time is due to it, so that it is served first in this step
    is_starved: bool = False  # as much time is due to the tier as can be
    kv_reserve: float = 0.0  # share of the KV blocks that a sequence of this tier leaves free when it starts

    @property
    def min_share_due(self) -> bool:
        return self.min_share > 0

    def beside(self, interactive_s: float, next_s: float = 0.0) -> "TierBudget":
        """Return the budget of a bulk tier in a step whose interactive part takes `interactive_s` seconds.

        If there is no such part, a request may wait for what bulk holds, such as KV blocks: then bulk must go on. The
        next decode or chunk of bulk, which takes `next_s` seconds, may be longer than a step of bulk alone: then it
        runs by itself.
        """
        limit_s = interactive_s + min(self.added_s, max(self.beside_s, next_s)) if interactive_s else self.alone_s
        return replace(self, limit=self.limit.at_most(limit_s)) if limit_s < NEVER_S else self


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets of all tiers for one step, and the predicted costs from which the budgets were computed."""

    tiers: Mapping[str, TierBudget]
    cost: StepCost  # of steps with prefills
    decode_cost: StepCost  # of steps without prefills
    # Of the requests that yield, by interactive tier. Not empty if there are any.
    yielding: Mapping[str, TierBudget] = field(default_factory=dict, kw_only=True)
