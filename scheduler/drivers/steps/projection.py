"""The request states as they will be after the step in flight, so that the next step can be planned before its end.

The projection assumes that no sequence ends with a stop token or fails, and that no token of a prompt comes from the
prefix cache. If it is wrong, the engine runs what is left: see `StepPlan.ahead`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from engine.interface import StepPlan, blocks_for
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.kv_budget import EngineView
from scheduler.request_state import RequestState

UNKNOWN_TOKEN = -1  # stands for the token that the step in flight samples


@dataclass(frozen=True, slots=True)
class Projection:
    """What else will be different after the step in flight."""

    view: EngineView  # with the blocks that the step allocates; blocks that it frees do not count yet
    ending: frozenset[str]  # the sequences that are certain to end with the step


@contextmanager
def projected(plan: StepPlan, table: RequestTable, view: EngineView) -> Iterator[Projection]:
    """Let the states in `table` be as after the step in flight, whose plan is `plan`, until the block ends.

    Inside the block, other changes of the states are allowed, except of what a projection changes: the tokens, and the
    number of those that are computed.
    """
    ending: set[str] = set()
    num_blocks = 0
    changed: list[tuple[RequestState, int, bool]] = []
    moved: list[RequestState] = []  # those that are no longer what they were for the table
    for run in plan.run:
        state = table.states.get(run.seq_id)
        if state is None:
            continue
        if state.ends_with(run.num_tokens, view.max_model_len):
            ending.add(state.id)
        num_blocks += _new_blocks(state, run.num_tokens, view.block_size)
        num_uncomputed, is_decode = state.num_uncomputed, bool(state.output_token_ids)
        num_tokens = min(run.num_tokens, num_uncomputed)
        state.num_computed_tokens += num_tokens
        samples = num_tokens == num_uncomputed
        if samples:
            state.output_token_ids.append(UNKNOWN_TOKEN)
        changed.append((state, num_tokens, samples))
        if num_uncomputed > 1 or not is_decode:
            table.update(state)
            moved.append(state)
    try:
        yield Projection(replace(view, free_blocks=max(0, view.free_blocks - num_blocks)), frozenset(ending))
    finally:
        for state, num_tokens, samples in changed:
            state.num_computed_tokens -= num_tokens
            if samples:
                state.output_token_ids.pop()
        for state in moved:
            table.update(state)


def _new_blocks(state: RequestState, num_tokens: int, block_size: int) -> int:
    """Return the largest number of blocks that a run allocates. One that begins may find all of its text cached."""
    computed = state.num_computed_tokens
    end = computed + num_tokens if computed else state.num_tokens
    return blocks_for(end, block_size) - blocks_for(computed, block_size)
