"""The SLA controller's word to batch formation: what each tier may do in the next step. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S

PREFILL_EXTRA_SHARE = 0.25  # of a step's decodes: what prefills may always add, or late decodes would starve them


@dataclass(frozen=True, slots=True)
class TierBudget:
    """The controller's word on one tier for this step."""

    max_num_seqs: int
    max_tokens: int = 1 << 30
    max_wait_s: float = 0.0
    gap_s: float = NEVER_S  # between two arrivals, on average
    step_time_s: float = NEVER_S  # the step may be predicted to last this long with work of this tier
    extra_share: float = 0.0  # in any case it may add this share to what the step takes without it, …
    hard_limit_s: float = NEVER_S  # … but for this: then others' next tokens would be late
    decodes_only: bool = False  # a first token is awaited above: prefills wait, decodes may add `extra_share`
    guaranteed: bool = False  # its floor is due: it goes first in this step
    reserve_blocks: int = 0  # stay free when one of its sequences starts


@dataclass(frozen=True, slots=True)
class Budgets:
    tiers: Mapping[str, TierBudget]
    cost: StepCost
