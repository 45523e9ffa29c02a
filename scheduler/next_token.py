"""When is the next token of an interactive sequence due, and how much time does that leave for a step?

Pure: request states and promises in, seconds out.

    deadline = min(arrival + TTFT + (n - 1) · TPOT,  last token + ITL)

with n the number of the token to come. What is not promised does not bind.
"""

from collections.abc import Iterable

from engine.step_time.model import StepCost
from scheduler.clock import NEVER_S
from scheduler.states import RequestState


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
