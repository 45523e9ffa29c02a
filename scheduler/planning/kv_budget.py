"""The budget of KV blocks while a plan is made: free blocks, reserved blocks, and preemptions that free more blocks.

Knows blocks and request states; does not know tier budgets or time limits. The budget errs only on the safe side, so
that the engine never has to refuse a plan. Blocks that a victim shares with other sequences do not count as freed, and
hits in the prefix cache do not reduce the number of blocks that a sequence needs.

A sequence starts or comes back only if there is room for all tokens that it has so far. It loses its blocks at most
`retry.max_preemptions` times (a key of its tier). After the last time, it comes back only if there is room for all
tokens that it may ever have. The part of this room that is not allocated yet stays reserved for the sequence.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.interface import PreemptionMode, blocks_for
from engine.step_time.cost import StepCost
from scheduler.request_state import RequestState, Status


@dataclass(frozen=True, slots=True)
class EngineView:
    """The capacity of the engine that the next plan can use: its limits, and the blocks that are free now."""

    num_blocks: int
    free_blocks: int
    block_size: int
    max_step_tokens: int
    max_model_len: int
    free_swap_blocks: int = 0
    swap_block_s: float = 0.0  # time to copy one block to the host or back
    whole_prompts: bool = False  # see `EngineInfo.whole_prompts`

    def reserve_blocks(self, share: float) -> int:
        """Return how many blocks a bulk sequence leaves free when it starts, if this share of all is reserved."""
        return math.ceil(share * self.num_blocks)


class BlockBudget:
    """The free blocks and the reserved blocks while one plan is made.

    `residents` are the states for which blocks may be reserved. `any_resident` says whether any sequence holds blocks
    before the plan.
    """

    def __init__(self, view: EngineView, cost: StepCost, residents: Iterable[RequestState], any_resident: bool) -> None:
        self._view = view
        self._cost = cost
        self._free = view.free_blocks
        self._free_swap = view.free_swap_blocks
        self._reserved: dict[str, int] = {}  # number of reserved blocks, by request id
        for state in residents:
            self._reserved[state.id] = self._reservation(state)
        self._total_reserved = sum(self._reserved.values())
        self._any_resident = any_resident
        self.swap_s = 0.0  # time in seconds that the plan's copies of blocks take

    @property
    def unreserved(self) -> int:
        """The number of free blocks that are not reserved for a sequence."""
        return self._free - self._total_reserved

    def allocate(
        self,
        state: RequestState,
        num_tokens: int,
        candidates: Callable[[], Iterable[RequestState]],
        reserve_blocks: int = 0,
    ) -> list[tuple[RequestState, PreemptionMode]] | None:
        """Allocate the blocks that `state` needs to run `num_tokens` more tokens.

        Return the sequences among `candidates` that are preempted to free blocks, each with the mode of its preemption.
        Return None and change nothing if there are not enough blocks. If `state` holds no blocks yet and other
        sequences do, at least `reserve_blocks` stay free.
        """
        need, available = self._demand(state, num_tokens, reserve_blocks)
        if not need and state.is_resident:
            return []
        chosen = self._victims(state, need - available, candidates) if need > available else []
        if chosen is None:
            return None
        preempted = [(victim, self._preempt(victim)) for victim in chosen]
        self._free -= need
        if state.id in self._reserved:
            self._use_reservation(state.id, need)
        elif state.status is Status.SWAPPED:
            self.swap_s += blocks_for(state.num_computed_tokens, self._view.block_size) * self._view.swap_block_s
        return preempted

    def _demand(self, state: RequestState, num_tokens: int, reserve_blocks: int) -> tuple[int, int]:
        """Return the number of blocks that `state` needs, and the number that it can get without a preemption."""
        size = self._view.block_size
        if not state.is_resident:
            kept_free = reserve_blocks if self._any_resident else 0
            return self._room_needed(state), self._free - self._total_reserved - kept_free
        computed = state.num_computed_tokens
        need = blocks_for(computed + num_tokens, size) - blocks_for(computed, size)
        own = self._reserved.get(state.id, 0)
        return need, self._free if need <= own else self._free - self._total_reserved + own

    def _room_needed(self, state: RequestState) -> int:
        """Return the number of blocks for which there must be room when `state` starts or comes back."""
        longest = min(state.request.max_total_tokens, self._view.max_model_len)
        return blocks_for(longest if state.is_preemption_exhausted else state.num_tokens, self._view.block_size)

    def _reservation(self, state: RequestState) -> int:
        """Return the number of blocks to reserve for a resident sequence.

        These are the blocks of the room that the sequence needs, minus the blocks that it holds already. A decode
        needs no reservation, unless its preemptions are exhausted.
        """
        if state.is_decode and not state.is_preemption_exhausted:
            return 0
        return max(0, self._room_needed(state) - state.blocks_held(self._view.block_size))

    def _use_reservation(self, request_id: str, num_blocks: int) -> None:
        used = min(self._reserved[request_id], num_blocks)
        self._reserved[request_id] -= used
        self._total_reserved -= used

    def _victims(
        self, state: RequestState, missing: int, candidates: Callable[[], Iterable[RequestState]]
    ) -> list[RequestState] | None:
        """Return the victims whose preemption frees `missing` blocks.

        Return None if all victims together do not free enough: then `state` cannot run, and no sequence is preempted.
        """
        chosen: list[RequestState] = []
        for victim in victims(state, candidates()):
            chosen.append(victim)
            missing -= victim.own_blocks(self._view.block_size) + self._reserved.get(victim.id, 0)
            if missing <= 0:
                return chosen
        return None

    def _preempt(self, victim: RequestState) -> PreemptionMode:
        view = self._view
        held = victim.blocks_held(view.block_size)
        mode = cheapest_mode(victim, view.block_size, self._cost, view.swap_block_s, self._free_swap)
        if mode is PreemptionMode.SWAP:
            self._free_swap -= held
            self.swap_s += held * view.swap_block_s
        self._free += victim.own_blocks(view.block_size)
        if victim.id in self._reserved:
            self._use_reservation(victim.id, self._reserved[victim.id])
        return mode


def has_blocks(newcomer: RequestState, view: EngineView, below: Iterable[RequestState]) -> bool:
    """Return whether there are enough blocks for all tokens of `newcomer`.

    Blocks count if they are free, or if a preemption of the `below` sequences would free them.
    """
    need = blocks_for(newcomer.num_tokens, view.block_size)
    if need <= view.free_blocks:
        return True
    return need <= view.free_blocks + sum(s.own_blocks(view.block_size) for s in below)


def victims(needy: RequestState, resident: Iterable[RequestState]) -> list[RequestState]:
    """Return the sequences that `needy` may preempt to get blocks, the best victim first.

    A sequence that starts or comes back preempts only sequences of strictly lower priority. One that runs and grows may
    also preempt sequences of its own priority with a later deadline, so two sequences never preempt each other in turn.
    The lowest priority goes first, and of equal priorities the newest sequence, because it loses the least work.
    """
    found = (s for s in resident if _may_preempt(needy, s) and not s.is_preemption_exhausted)
    return sorted(found, key=lambda s: (s.priority, -s.claimed_s, s.id))


def _may_preempt(needy: RequestState, victim: RequestState) -> bool:
    if victim.priority != needy.priority:
        return victim.priority < needy.priority
    return needy.is_resident and victim.edf_key > needy.edf_key


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
