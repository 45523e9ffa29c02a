"""Deadlines: when the next token of an interactive request is due, and how urgent work without a latency SLO is.

Pure: request states, SLOs and predicted costs in; seconds and shares out. For interactive sequences

    deadline = min(arrival + TTFT + (n - 1) · TPOT,  last token + ITL)

with n the number of the token to come; a target that the tier does not have is left out. For work with a completion
deadline, laxity is the time that it may still be kept waiting: without any, it must run in every step from now on.
Urgent work is boosted just above all other work without an SLO, and the most urgent piece raises its tier's min share.
"""

from collections.abc import Iterable, Sequence

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.request_state import RequestState


def deadline_s(state: RequestState) -> float:
    """On the worker's clock; inf where nothing is promised."""
    slo = state.tier.slo
    due_s = NEVER_S
    if slo.ttft_p99_ms is not None and (slo.tpot_ms is not None or state.awaits_first_token):
        paced_ms = slo.ttft_p99_ms + (slo.tpot_ms or 0.0) * len(state.output_token_ids)
        due_s = state.arrived_s + paced_ms / 1000
    if slo.itl_p99_ms is not None and state.last_token_s is not None:
        due_s = min(due_s, state.last_token_s + slo.itl_p99_ms / 1000)
    return due_s


def slack_s(decoding: Iterable[RequestState], now: float) -> float:
    """Until the earliest next-token deadline of sequences that have had their first; inf without any."""
    return min((deadline_s(state) for state in decoding), default=NEVER_S) - now


def itl_cap_s(decoding: Iterable[RequestState]) -> float:
    """The shortest gap promised to any of them."""
    return min((s.tier.slo.itl_p99_ms or NEVER_S for s in decoding), default=NEVER_S) / 1000


def prefill_s(state: RequestState, cost: StepCost) -> float:
    """What is left of its prefill takes."""
    return cost.prefill(state.num_uncomputed, state.num_computed_tokens)


def is_late(state: RequestState, cost: StepCost, now: float) -> bool:
    """Its next token cannot be in time any more, whatever is done for it. It then waits for those that can be, and is
    nothing that a newcomer would have to wait for."""
    return now + prefill_s(state, cost) > deadline_s(state)


def by_due(states: Iterable[RequestState], cost: StepCost, now: float) -> tuple[list[RequestState], list[RequestState]]:
    """Those that can be in time, by deadline plus remaining work, so that short prompts do not wait for a long one that
    is due at about the same time; and those that cannot, as they came."""
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
    """Seconds until the deadline (`left_s`) minus those that the rest of the work takes; negative: too late already.

    `context`: tokens computed already. `remaining_output_tokens`: as many as may come at most; how many will, nobody
    knows, and what ends sooner was urgent too early rather than too late.
    """
    return left_s - work_s(remaining_prefill_tokens, remaining_output_tokens, cost, context)


def work_s(prefill_tokens: int, output_tokens: int, cost: StepCost, context: int = 0) -> float:
    """Seconds for one request that is in every step: its prefill as one chunk, which gives the first output token,
    then a step for each other token. Smaller chunks attend over as much in all; only their steps' fixed cost is more.
    """
    prefill = cost.step_s + cost.prefill(prefill_tokens, context) if prefill_tokens else 0.0
    decodes = max(0, output_tokens - 1) if prefill_tokens else output_tokens
    return prefill + decodes * (cost.step_s + cost.decode(context + prefill_tokens + decodes // 2))


def is_urgent(laxity_s: float, horizon_s: float) -> bool:
    """Must it go before higher tiers now? Not what is late by more than the horizon: it is lost, and would take with it
    what could still be on time. A horizon of 0: never."""
    return -horizon_s < laxity_s < horizon_s


def urgency_of(state: RequestState, cost: StepCost, now: float) -> float:
    """In [0, 1]: how near a request without a latency promise is to missing its deadline, or how far past the wait that
    its tier allows before its first token; 0 where neither presses."""
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
    """Of those of a tier without a promise that press, in (0, 1]."""
    if not tier.can_be_urgent:
        return {}
    found = ((state.id, urgency_of(state, cost, now)) for state in states)
    return {request_id: urgency for request_id, urgency in found if urgency > 0}


def boosted_priority(tiers: Sequence[Tier]) -> float:
    return max((tier.priority for tier in tiers if not tier.is_interactive), default=0) + 0.5


def age_share(interactive: Iterable[RequestState], now: float) -> float:
    """The longest wait for a first step, as a share of what is promised of the first token."""
    waiting = (s for s in interactive if s.awaits_first_token and not s.first_scheduled_s and s.tier.slo.ttft_p99_ms)
    return max(((now - s.arrived_s) * 1000 / (s.tier.slo.ttft_p99_ms or NEVER_S) for s in waiting), default=0.0)
