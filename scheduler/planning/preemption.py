"""Who gives way, and how. Pure choices over request states; no clock, no I/O.

The rules, each paid for by somebody's incident: a newcomer only takes from a strictly higher distance (its priority
above the victim's); inside a tier only an older sequence that must grow may take from a newer one, so that two equals
never evict each other in turn; lowest tier first, then the newest (least sunk cost), sparing what is nearly done;
nobody loses its blocks more often than its tier's `retry.max_preemptions` says, to whomever. Who has come that far
returns only when there is room for all that it may ever need, and keeps that room to its end: nobody has to wait for
a place that only a worn victim could give, longer than until that one ends.
"""

from collections.abc import Iterable

from engine.interface import PreemptionMode
from engine.step_time.cost import StepCost
from scheduler.request_state import RequestState

NEARLY_DONE = 0.9  # of its max_tokens


def is_preemption_exhausted(state: RequestState) -> bool:
    """It may not lose its blocks again."""
    return state.num_preemptions >= state.tier.retry.max_preemptions


def newcomer_victims(newcomer: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Whom `newcomer` may evict to start, best victim first."""
    lower = (s for s in resident if s.priority < newcomer.priority)
    return sorted((s for s in lower if not is_preemption_exhausted(s)), key=_victim_key)


def growth_victims(needy: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Whom the running `needy` may evict to get its next block: lower tiers, and newer ones of its own."""
    return sorted((s for s in resident if _below(s, needy) and not is_preemption_exhausted(s)), key=_victim_key)


def cheapest_mode(
    victim: RequestState, block_size: int, cost: StepCost, swap_block_s: float, free_swap_blocks: int
) -> PreemptionMode:
    """How the resident `victim` shall lose its blocks. What it shares with others stays on the device, and is neither
    copied back nor computed again."""
    held, own = victim.blocks_held(block_size), victim.own_blocks(block_size)
    if not 0 < held <= free_swap_blocks:
        return PreemptionMode.RECOMPUTE
    num_shared = (held - own) * block_size
    recompute_s = cost.prefill(max(0, victim.num_computed_tokens - num_shared), num_shared)
    swap_s = (held + own) * swap_block_s
    return PreemptionMode.SWAP if swap_s < recompute_s else PreemptionMode.RECOMPUTE


def _below(victim: RequestState, needy: RequestState) -> bool:
    if victim.priority != needy.priority:
        return victim.priority < needy.priority
    return victim.edf_key > needy.edf_key


def _victim_key(state: RequestState) -> tuple[float, bool, float, str]:
    return (state.priority, _is_nearly_done(state), -state.claimed_s, state.id)


def _is_nearly_done(state: RequestState) -> bool:
    return len(state.output_token_ids) >= NEARLY_DONE * state.request.sampling.max_tokens
