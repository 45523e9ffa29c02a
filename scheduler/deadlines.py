"""Deadlines: when the next token of an interactive request is due, and how urgent work without a latency SLO is.

Pure: request states, SLOs and predicted costs in; seconds and shares out. For interactive sequences

    deadline = min(arrival + TTFT + (n - 1) · TPOT,  last token + ITL)

with n the number of the next token; targets that the tier does not have are left out. For requests with a completion
deadline, laxity is the time that they may still wait: with none left, a request must run in every step from now on.
Urgent requests are boosted just above all others without an SLO, and the most urgent one raises its tier's min share.
"""

from collections.abc import Iterable, Sequence

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.request_state import RequestState


def deadline_s(state: RequestState) -> float:
    """Return when the next token is due, on the worker's clock; inf without a target for it."""
    slo = state.tier.slo
    due_s = NEVER_S
    if slo.ttft_p99_ms is not None and (slo.tpot_ms is not None or state.awaits_first_token):
        paced_ms = slo.ttft_p99_ms + (slo.tpot_ms or 0.0) * len(state.output_token_ids)
        due_s = state.arrived_s + paced_ms / 1000
    if slo.itl_p99_ms is not None and state.last_token_s is not None:
        due_s = min(due_s, state.last_token_s + slo.itl_p99_ms / 1000)
    return due_s


def slack_s(decoding: Iterable[RequestState], now: float) -> float:
    """Return the time until the earliest next-token deadline of `decoding`; inf if there are none."""
    return min((deadline_s(state) for state in decoding), default=NEVER_S) - now


def itl_cap_s(decoding: Iterable[RequestState]) -> float:
    """Return the shortest ITL SLO of `decoding`; inf without any."""
    return min((s.tier.slo.itl_p99_ms or NEVER_S for s in decoding), default=NEVER_S) / 1000


def prefill_s(state: RequestState, cost: StepCost) -> float:
    """Return how long the rest of the prefill takes."""
    return cost.prefill(state.num_uncomputed, state.num_computed_tokens)


def is_late(state: RequestState, cost: StepCost, now: float) -> bool:
    """Return whether the next token cannot be in time any more. Such a request waits for those that can be in time, and
    admission does not count it as work ahead of a new one."""
    return now + prefill_s(state, cost) > deadline_s(state)


def split_by_deadline(
    states: Iterable[RequestState], cost: StepCost, now: float
) -> tuple[list[RequestState], list[RequestState]]:
    """Return the states that can be in time and those that cannot. The former are sorted by deadline plus remaining
    work, so that short prompts do not wait for a long one that is due at about the same time; the latter by deadline.
    """
    in_time: list[RequestState] = []
    late: list[RequestState] = []
    for state in states:
        (late if is_late(state, cost, now) else in_time).append(state)
    in_time.sort(key=lambda s: (deadline_s(s) + prefill_s(s, cost), s.edf_key))
    late.sort(key=lambda s: s.edf_key)
    return in_time, late


def laxity_s(
    left_s: float, remaining_prefill_tokens: int, remaining_output_tokens: int, cost: StepCost, context: int
) -> float:
    """Return the seconds until the deadline (`left_s`) minus those that the rest of the work takes; negative if it is
    too late already.

    `context`: tokens computed already. `remaining_output_tokens`: an upper bound; a request that ends sooner was urgent
    too early rather than too late.
    """
    return left_s - work_s(remaining_prefill_tokens, remaining_output_tokens, cost, context)


def work_s(prefill_tokens: int, output_tokens: int, cost: StepCost, context: int = 0) -> float:
    """Return the seconds that a request takes if it is in every step: its prefill as one chunk, which gives the first
    output token, then a step for each other token. Smaller chunks attend over as much in total; they only cost more
    steps."""
    prefill = cost.step_s + cost.prefill(prefill_tokens, context) if prefill_tokens else 0.0
    decodes = max(0, output_tokens - 1) if prefill_tokens else output_tokens
    return prefill + decodes * (cost.step_s + cost.decode(context + prefill_tokens + decodes // 2))


def is_urgent(laxity: float, horizon_s: float) -> bool:
    """Return whether a request must go before higher tiers now. A request that is late by more than the horizon is not
    urgent: it is lost, and would make others late that can still be in time. With a horizon of 0, nothing is urgent."""
    return -horizon_s < laxity < horizon_s


def urgency_of(state: RequestState, cost: StepCost, now: float) -> float:
    """Return how urgent a request without a latency SLO is, in [0, 1]: how near it is to missing its deadline, or how
    far its wait for a first token is past `aging_ms` (1 at twice that)."""
    tier, urgency = state.tier, 0.0
    if tier.urgent_ms:
        outputs = state.request.sampling.max_tokens - len(state.output_token_ids)
        laxity = laxity_s(state.deadline_s - now, state.num_uncomputed, outputs, cost, state.num_computed_tokens)
        horizon_s = tier.urgent_ms / 1000
        if is_urgent(laxity, horizon_s):
            urgency = min(1.0, 1 - laxity / horizon_s)
    if tier.aging_ms and state.awaits_first_token:
        urgency = max(urgency, min(1.0, (now - state.arrived_s) * 1000 / tier.aging_ms - 1))
    return urgency


def urgencies(tier: Tier, states: Iterable[RequestState], cost: StepCost, now: float) -> dict[str, float]:
    """Return the urgency in (0, 1] of each urgent request of a tier without an SLO."""
    if not tier.can_be_urgent:
        return {}
    found = ((state.id, urgency_of(state, cost, now)) for state in states)
    return {request_id: urgency for request_id, urgency in found if urgency > 0}


def boosted_priority(tiers: Sequence[Tier]) -> float:
    """Return the priority of urgent requests: just above all tiers without an SLO."""
    return max((tier.priority for tier in tiers if not tier.is_interactive), default=0) + 0.5


def age_share(interactive: Iterable[RequestState], now: float) -> float:
    """Return the longest wait for a first step so far, as a share of the TTFT SLO; 0 if no request waits."""
    waiting = (s for s in interactive if s.awaits_first_token and not s.first_scheduled_s and s.tier.slo.ttft_p99_ms)
    return max(((now - s.arrived_s) * 1000 / (s.tier.slo.ttft_p99_ms or NEVER_S) for s in waiting), default=0.0)
