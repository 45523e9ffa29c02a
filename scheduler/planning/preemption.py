"""The rules of preemption: which sequences lose their KV blocks to another sequence, and in which mode.

All functions are pure: they read request states, and use no clock and no I/O. Each rule prevents a failure that
schedulers have had:
- A newcomer (a sequence that starts or comes back) preempts only sequences of strictly lower priority.
- Within a tier, a sequence that needs another block may preempt only sequences with a later deadline. So two sequences
  never preempt each other in turn.
- Sequences of the lowest priority are preempted first. Among equal priorities, the newest sequence is preempted first,
  because it loses the least work.
- A sequence loses its blocks at most `retry.max_preemptions` times (a key of its tier). After the last time, it comes
  back only when there is room for all tokens that it may ever have, and it keeps this room to its end. A request that
  needs these blocks waits at most until that sequence ends.
"""

from collections.abc import Iterable

from engine.interface import PreemptionMode
from engine.step_time.cost import StepCost
from scheduler.request_state import RequestState


def newcomer_victims(newcomer: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Return the sequences that `newcomer` may preempt to start. The best victim is the first."""
    lower = (s for s in resident if s.priority < newcomer.priority)
    return sorted((s for s in lower if not s.is_preemption_exhausted), key=_victim_key)


def growth_victims(needy: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Return the sequences that the running sequence `needy` may preempt to get more blocks.

    These are sequences of lower priority, and sequences of the same priority with a later deadline. The best victim is
    the first.
    """
    return sorted((s for s in resident if _below(s, needy) and not s.is_preemption_exhausted), key=_victim_key)


def cheapest_mode(
    victim: RequestState, block_size: int, cost: StepCost, swap_block_s: float, free_swap_blocks: int
) -> PreemptionMode:
    """Return the cheaper of two modes for the resident sequence `victim`: swap or recompute.

    Blocks that the victim shares with other sequences stay on the device: they are neither copied back nor recomputed.
    """
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


def _victim_key(state: RequestState) -> tuple[float, float, str]:
    return (state.priority, -state.claimed_s, state.id)
