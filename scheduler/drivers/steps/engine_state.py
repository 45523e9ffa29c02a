"""The scheduler's record of its engine: free blocks, and the sequences to abort.

Knows results, and reads request states; decides nothing. `StepCore` owns it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.interface import EngineInfo, StepResult, blocks_for
from scheduler.planning.kv_budget import EngineView
from scheduler.request_state import RequestState


@dataclass(slots=True)
class _Abandoned:
    """The KV blocks that an abandoned sequence is known to hold, and how many of them other sequences share."""

    num_blocks: int
    num_shared: int

    @property
    def own_blocks(self) -> int:
        return max(0, self.num_blocks - self.num_shared)


class EngineState:
    """The free blocks of the engine, and the sequences that it must abort."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._free_blocks = info.num_blocks
        self._free_swap_blocks = info.num_swap_blocks
        self._abandoned: dict[str, _Abandoned] = {}

    @property
    def kv_usage(self) -> float:
        return 1.0 - self._free_blocks / self._info.num_blocks

    def view(self) -> EngineView:
        """Return the capacity that the next plan can use.

        The blocks of sequences that the plan aborts count as free, because the engine executes aborts first.
        """
        info = self._info
        return EngineView(
            num_blocks=info.num_blocks,
            free_blocks=self._free_blocks + sum(a.own_blocks for a in self._abandoned.values()),
            block_size=info.block_size,
            max_step_tokens=info.max_step_tokens,
            max_model_len=info.max_model_len,
            free_swap_blocks=self._free_swap_blocks,
            swap_block_s=info.swap_block_s,
            whole_prompts=info.whole_prompts,
        )

    # -- sequences that the engine holds and no request needs any more -----------------------------------------

    def abandon(self, state: RequestState) -> None:
        """Add a sequence to the sequences that the next plan aborts."""
        self._abandoned[state.id] = _Abandoned(state.blocks_held(self._info.block_size), state.num_shared_blocks)

    @property
    def num_abandoned(self) -> int:
        return len(self._abandoned)

    def is_abandoned(self, request_id: str) -> bool:
        return request_id in self._abandoned

    def forget_abandoned(self, request_id: str) -> None:
        """Remove a sequence from the sequences to abort, because it has ended by itself."""
        del self._abandoned[request_id]

    @property
    def aborts(self) -> Iterable[str]:
        """The ids of the sequences that the next plan must abort."""
        return self._abandoned.keys()

    def pop_aborts(self) -> tuple[str, ...]:
        """Return the ids of the sequences to abort, and clear the list. The caller puts them into a plan."""
        aborts = tuple(sorted(self._abandoned))
        self._abandoned.clear()
        return aborts

    # -- a step ------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> None:
        """Take over the free blocks of a result, and what it says of abandoned sequences."""
        self._free_blocks, self._free_swap_blocks = result.free_blocks, result.free_swap_blocks
        for output in result.outputs:
            if output.seq_id in self._abandoned:
                held = blocks_for(output.num_computed_tokens, self._info.block_size)
                self._abandoned[output.seq_id].num_blocks = held
        for seq_id, num_shared in result.shared_blocks:
            if seq_id in self._abandoned:
                self._abandoned[seq_id].num_shared = num_shared
