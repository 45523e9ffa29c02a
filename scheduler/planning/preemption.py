"""Which sequences are preempted for which, and how. Pure choices over request states; no clock, no I/O.

The rules, each of which prevents a failure that schedulers have had:
- A newcomer preempts only sequences of strictly lower priority.
- Within a tier, only an older sequence that must grow may preempt a newer one. Two equals never preempt each other in
  turn.
- The lowest tier gives way first, then the newest sequence (least work lost), sparing those that are nearly done.
- A sequence loses its blocks at most `retry.max_preemptions` times, as its tier says. After the last time it returns
  only when there is room for all tokens that it may ever have, and keeps this room to its end: a request that needs
  these blocks waits no longer than until that sequence ends.
"""

from collections.abc import Iterable

from engine.interface import PreemptionMode
from engine.step_time.cost import StepCost
from scheduler.request_state import RequestState

NEARLY_DONE = 0.9  # share of its max_tokens that a sequence has generated


def is_preemption_exhausted(state: RequestState) -> bool:
    """Return whether a sequence may not lose its blocks again."""
    return state.num_preemptions >= state.tier.retry.max_preemptions


def newcomer_victims(newcomer: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Return the sequences that `newcomer` may preempt to start, best victim first."""
    lower = (s for s in resident if s.priority < newcomer.priority)
    return sorted((s for s in lower if not is_preemption_exhausted(s)), key=_victim_key)


def growth_victims(needy: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Return the sequences that the running `needy` may preempt to get its next block, best victim first: those of
    lower tiers, and newer ones of its own."""
    return sorted((s for s in resident if _below(s, needy) and not is_preemption_exhausted(s)), key=_victim_key)


def cheapest_mode(
    victim: RequestState, block_size: int, cost: StepCost, swap_block_s: float, free_swap_blocks: int
) -> PreemptionMode:
    """Return whether the resident `victim` is swapped or computed again. Blocks that it shares with others stay on the
    device: they are neither copied back nor computed again."""
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
