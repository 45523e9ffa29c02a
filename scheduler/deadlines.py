"""Deadlines: when the next token of an interactive request is due, and how urgent a request without a latency SLO is.

All functions are pure: they compute seconds and shares from request states, SLOs and predicted costs. The next token
of an interactive sequence has the deadline

    deadline = min(arrival + TTFT + (n - 1) · TPOT,  last token + ITL)

Here n is the number of the next token. A target that the tier does not have is left out.

A request without a latency SLO has a completion deadline. Its laxity is the time that it may still wait: a request with
laxity 0 must run in every step from now on. An urgent request gets a priority just above all tiers without a latency
SLO. The most urgent request of a tier also raises the tier's min share. A request that asked for an earlier deadline
than its tier's goes before all others of its tier until then.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.request import OWN_REQUESTS
from scheduler.request_state import RequestState


def deadline_s(state: RequestState) -> float:
    """Return when the next token is due, in seconds of the worker's clock; inf if the tier has no target for it."""
    slo = state.tier.slo
    due_s = NEVER_S
    if slo.ttft_p99_ms is not None and (slo.tpot_ms is not None or state.awaits_first_token):
        paced_ms = slo.ttft_p99_ms + (slo.tpot_ms or 0.0) * len(state.output_token_ids)
        due_s = state.arrived_s + paced_ms / 1000
    if slo.itl_p99_ms is not None and state.last_token_s is not None:
        due_s = min(due_s, state.last_token_s + slo.itl_p99_ms / 1000)
    return due_s


def prefill_s(state: RequestState, cost: StepCost) -> float:
    """Return the predicted seconds that the rest of the prefill takes."""
    return cost.prefill(state.num_uncomputed, state.num_computed_tokens)


def is_too_long(state: RequestState, cost: StepCost) -> bool:
    """Return whether the prompt usually takes longer than the TTFT SLO even if it has the engine for itself."""
    ttft_ms = state.tier.slo.ttft_p99_ms
    if ttft_ms is None:
        return False
    # At the usual pace: while something slows the engine down, the order of all others must not change.
    return 1000 * cost.prefill(len(state.request.prompt_token_ids), 0) > ttft_ms * cost.slowdown


def split_prefills(
    states: Iterable[RequestState], cost: StepCost, now: float, *, is_overload: bool
) -> tuple[list[RequestState], list[RequestState]]:
    """Return the prefills that go first, and the others.

    Those go first that can still be in time, if the rest of the prefill runs now. In an overload hardly any can, and
    those go first whose prompts are short enough for the SLO. The first are sorted by deadline plus remaining work, so
    that a short prompt does not wait for a long prompt that is due at about the same time. Late ones are sorted by
    deadline.
    """

    def due_s(state: RequestState) -> float:
        return deadline_s(state) + prefill_s(state, cost)

    first: list[RequestState] = []
    last: list[RequestState] = []
    for state in states:
        is_last = is_too_long(state, cost) if is_overload else now + prefill_s(state, cost) > deadline_s(state)
        (last if is_last else first).append(state)
    first.sort(key=lambda s: (due_s(s), s.edf_key))
    last.sort(key=lambda s: (due_s(s) if is_overload else 0.0, s.edf_key))
    return first, last


def work_s(prefill_tokens: int, output_tokens: int, cost: StepCost, context: int = 0) -> float:
    """Return the seconds that a request takes if it runs in every step.

    The prefill is counted as one chunk, which gives the first output token. Each further output token takes one step.
    A prefill in smaller chunks has the same attention work in total, and only takes more steps.
    """
    prefill = cost.step_s + cost.prefill(prefill_tokens, context) if prefill_tokens else 0.0
    decodes = max(0, output_tokens - 1) if prefill_tokens else output_tokens
    return prefill + decodes * (cost.step_s + cost.decode(context + prefill_tokens + decodes // 2))


def urgency_of(state: RequestState, cost: StepCost, now: float) -> float:
    """Return how urgent a request without a latency SLO is, in [0, 1]. The result is the larger of two urgencies.

    The first one grows as the laxity falls from `urgent_ms` to 0. The second one grows as the wait for the first token
    rises from `aging_ms` to twice `aging_ms`.
    """
    tier, urgency = state.tier, 0.0
    if tier.urgent_ms:
        laxity = laxity_s(state, cost, now)
        horizon_s = min(tier.urgent_ms, state.request.urgent_ms or tier.urgent_ms) / 1000
        # A deadline that is missed by more than the horizon is lost: urgent work would delay what can still be in time.
        if -horizon_s < laxity < horizon_s:
            urgency = min(1.0, 1 - laxity / horizon_s)
    if tier.aging_ms and state.awaits_first_token:
        urgency = max(urgency, min(1.0, (now - state.arrived_s) * 1000 / tier.aging_ms - 1))
    return urgency


def laxity_s(state: RequestState, cost: StepCost, now: float) -> float:
    """Return the seconds that a request may still wait: until its deadline, less the time that its work takes.

    If negative, the request misses its deadline. All tokens up to `max_tokens` count as work: a request that ends with
    fewer becomes urgent too early, but never too late.
    """
    left_s = state.deadline_s - now
    if state.request.urgent_ms:  # a part of a job, whose deadline leaves time for its work
        return left_s
    outputs = state.request.sampling.max_tokens - len(state.output_token_ids)
    return left_s - work_s(state.num_uncomputed, outputs, cost, state.num_computed_tokens)


def count_missing(states: Iterable[RequestState], cost: StepCost, now: float) -> int:
    """Return how many requests miss their completion deadlines, even if they run in every step from now on."""
    return sum(laxity_s(state, cost, now) < 0 for state in states)


def urgencies(tier: Tier, states: Iterable[RequestState], cost: StepCost, now: float) -> dict[str, float]:
    """Return the urgent requests of a tier: request id → urgency in (0, 1]. Interactive tiers have none."""
    if not tier.can_be_urgent:
        return {}
    found = ((state.id, urgency_of(state, cost, now)) for state in states)
    return {request_id: urgency for request_id, urgency in found if urgency > 0}


def has_own_deadline(state: RequestState, now: float) -> bool:
    """Return whether a request without a latency SLO asked for an earlier deadline than its tier's, still to come."""
    request, tier = state.request, state.tier
    is_own = not request.urgent_ms and request.deadline_ms - request.arrival_ms < tier.deadline_ms
    return is_own and not tier.is_interactive and now < state.deadline_s


def boosted_priorities(
    tiers: Sequence[Tier], states: Iterable[RequestState], urgent: Collection[str], now: float
) -> dict[str, float]:
    """Return the priority of each request that goes before others without a latency SLO: before all if it is urgent.

    One with a deadline of its own goes before those of its tier. Of a key that shares the tier, the first few do.
    `urgent` holds the ids of urgent requests.
    """
    own: defaultdict[str, defaultdict[str, list[RequestState]]] = defaultdict(lambda: defaultdict(list))  # by tier, key
    for state in states:
        own[state.tier.name][state.request.owner] += [state] if has_own_deadline(state, now) else []
    boosted: dict[str, float] = {}
    for by_key in own.values():
        most = None if len(by_key) == 1 else OWN_REQUESTS
        for found in by_key.values():
            first = sorted(found, key=lambda s: s.edf_key)[:most]
            boosted |= {state.id: state.tier.priority + 0.5 for state in first}
    highest = max((tier.priority for tier in tiers if not tier.is_interactive), default=0)
    return {**boosted, **dict.fromkeys(urgent, highest + 0.5)}
