"""KV blocks while a plan is made: what is free, what is promised, and who gives way for whom.

Knows blocks and request states; not tiers' budgets, not time limits. It errs on the safe side only: what a victim
shares with others does not count as freed, and what the prefix cache will spare a sequence is not counted on, so that
an engine never has to refuse a plan.

Whoever starts, or comes back, has room for all tokens that it knows, and for all that it may ever have once it is worn
(`scheduler.planning.preemption`). What of that is not allocated yet stays promised: others do not get it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.interface import PreemptionMode, blocks_for
from engine.step_time.cost import StepCost
from scheduler.planning.preemption import cheapest_mode, growth_victims, is_preemption_exhausted, newcomer_victims
from scheduler.request_state import RequestState, Status


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the engine can take now."""

    free_blocks: int
    block_size: int
    max_step_tokens: int
    max_model_len: int
    watermark_blocks: int = 0  # kept free when a new sequence starts, so that running ones can grow
    free_swap_blocks: int = 0
    swap_block_s: float = 0.0  # time to copy a block either way


class BlockBudget:
    """Of one plan. `promised`: the states on the device that may not hold yet what they are to have; `any_resident`:
    some state is there before it."""

    def __init__(self, view: EngineView, cost: StepCost, promised: Iterable[RequestState], any_resident: bool) -> None:
        self._view = view
        self._cost = cost
        self._free = view.free_blocks
        self._free_swap = view.free_swap_blocks
        self._promised: dict[str, int] = {}
        for state in promised:
            self._promised[state.id] = self._promise(state)
        self._total_promised = sum(self._promised.values())
        self._any_resident = any_resident
        self._watermark = view.watermark_blocks if any_resident else 0
        self.swap_s = 0.0  # time that the plan's copies take

    def take(
        self,
        state: RequestState,
        num_tokens: int,
        candidates: Callable[[], Iterable[RequestState]],
        reserve_blocks: int = 0,
    ) -> list[tuple[RequestState, PreemptionMode]] | None:
        """Reserve what `state` needs to run `num_tokens` more, by evicting some of `candidates` where that is allowed
        and enough; who is evicted, and how. None: it cannot be had, and nothing has changed. `reserve_blocks` stay free
        when it starts."""
        need, spare = self._demand(state, num_tokens, reserve_blocks)
        victims = self._victims(state, need - spare, candidates) if need > spare else []
        if victims is None:
            return None
        evicted = [(victim, self._evict(victim)) for victim in victims]
        self._free -= need
        if state.id in self._promised:
            self._keep_promise(state.id, need)
        elif state.status is Status.SWAPPED:
            self.swap_s += blocks_for(state.num_computed_tokens, self._view.block_size) * self._view.swap_block_s
        return evicted

    def _demand(self, state: RequestState, num_tokens: int, reserve_blocks: int) -> tuple[int, int]:
        """The blocks that `state` needs, and those that it may have without harming anybody."""
        size = self._view.block_size
        if not state.is_resident:
            kept = max(self._watermark, reserve_blocks if self._any_resident else 0)
            return self._goal(state), self._free - self._total_promised - kept
        need = max(0, blocks_for(state.num_computed_tokens + num_tokens, size) - state.blocks_held(size))
        promised = self._promised.get(state.id, 0)
        return need, self._free if need <= promised else self._free - self._total_promised + promised

    def _goal(self, state: RequestState) -> int:
        """Blocks that it has room for from its start on."""
        longest = min(state.request.max_total_tokens, self._view.max_model_len)
        return blocks_for(longest if is_preemption_exhausted(state) else state.num_tokens, self._view.block_size)

    def _promise(self, state: RequestState) -> int:
        """Of a resident's goal, what it does not hold yet. One that decodes has nothing left but its growth."""
        if state.is_decode and not is_preemption_exhausted(state):
            return 0
        return max(0, self._goal(state) - state.blocks_held(self._view.block_size))

    def _keep_promise(self, request_id: str, num_blocks: int) -> None:
        kept = min(self._promised[request_id], num_blocks)
        self._promised[request_id] -= kept
        self._total_promised -= kept

    def _victims(
        self, state: RequestState, missing: int, candidates: Callable[[], Iterable[RequestState]]
    ) -> list[RequestState] | None:
        """Enough victims for `missing` blocks, or None: nobody is evicted for one that cannot run now."""
        choose = growth_victims if state.is_resident else newcomer_victims
        chosen: list[RequestState] = []
        for victim in choose(state, candidates()):
            chosen.append(victim)
            missing -= victim.own_blocks(self._view.block_size) + self._promised.get(victim.id, 0)
            if missing <= 0:
                return chosen
        return None

    def _evict(self, victim: RequestState) -> PreemptionMode:
        view = self._view
        held = victim.blocks_held(view.block_size)
        mode = cheapest_mode(victim, view.block_size, self._cost, view.swap_block_s, self._free_swap)
        if mode is PreemptionMode.SWAP:
            self._free_swap -= held
            self.swap_s += held * view.swap_block_s
        self._free += victim.own_blocks(view.block_size)
        if victim.id in self._promised:
            self._keep_promise(victim.id, self._promised[victim.id])
        return mode


def has_blocks(newcomer: RequestState, view: EngineView, below: Iterable[RequestState]) -> bool:
    """Those free, and those that `below` would give up, are enough for all its tokens."""
    need = blocks_for(newcomer.num_tokens, view.block_size)
    if need <= view.free_blocks:
        return True
    return need <= view.free_blocks + sum(s.own_blocks(view.block_size) for s in below)
