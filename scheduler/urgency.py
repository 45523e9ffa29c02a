"""How much time does a deadline leave, once the work before it is counted?

Pure: numbers and states in, numbers out; knows no clock. Laxity is the time that a request may still be kept waiting:
what has none left must run in every step from now on, or its deadline passes.
"""

from engine.step_time.model import StepCost
from scheduler.states import RequestState


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
