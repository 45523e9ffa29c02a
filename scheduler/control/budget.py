"""What the SLA controller tells batch formation: what each tier may do in the next step. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.control.step_limit import StepLimit


@dataclass(frozen=True, slots=True)
class TierBudget:
    """What one tier may do in the next step."""

    max_num_seqs: int
    max_tokens: int = 1 << 30
    max_wait_s: float = 0.0  # how long newcomers may wait for others to share their first step
    arrival_gap_s: float = NEVER_S  # between two arrivals, on average
    limit: StepLimit = StepLimit()  # how long the step may take with work of this tier
    decodes_only: bool = False  # a tier above awaits a first token: prefills wait, decodes add `limit.extra_share`
    guaranteed: bool = False  # its min share is due: it goes first in this step
    reserve_blocks: int = 0  # KV blocks that stay free when one of its sequences starts


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets of all tiers for one step, and the predicted costs that they were made with."""

    tiers: Mapping[str, TierBudget]
    cost: StepCost
