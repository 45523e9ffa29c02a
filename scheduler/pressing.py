"""Which of the held requests press: work whose deadline nears or that has waited too long; and how long interactive
requests have waited for their first step.

Pure. Work that presses is raised just above all other work without a promise; the most urgent piece of it raises its
tier's floor.
"""

from collections.abc import Iterable, Sequence

from engine.step_time.model import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.states import RequestState
from scheduler.urgency import urgency_of


def urgencies(tier: Tier, states: Iterable[RequestState], cost: StepCost, now: float) -> dict[str, float]:
    """Of those of a tier without a promise that press, in (0, 1]."""
    if not tier.can_press:
        return {}
    found = ((state.id, urgency_of(state, cost, now)) for state in states)
    return {request_id: urgency for request_id, urgency in found if urgency > 0}


def raised_priority(tiers: Sequence[Tier]) -> float:
    return max((tier.priority for tier in tiers if not tier.is_interactive), default=0) + 0.5


def age_share(interactive: Iterable[RequestState], now: float) -> float:
    """The longest wait for a first step, as a share of what is promised of the first token."""
    waiting = (s for s in interactive if s.awaits_first_token and not s.first_scheduled_s and s.tier.slo.ttft_p99_ms)
    return max(((now - s.arrived_s) * 1000 / (s.tier.slo.ttft_p99_ms or NEVER_S) for s in waiting), default=0.0)
