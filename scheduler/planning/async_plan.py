"""Async scheduling: the plan that follows the running step, made before that step's result is known, so that the
device does not wait for the host.

Pure. Such a plan is made only when nothing is left to decide: every sequence that is held decodes, all of them are in
the running step, and all may go on. Anything else waits for the result and for `form_batch`.
"""

from engine.interface import Run, StepPlan, blocks_for
from scheduler.planning.kv_budget import EngineView
from scheduler.planning.request_table import RequestTable
from scheduler.request_state import RequestState


def async_plan(running: StepPlan, step_id: int, view: EngineView, table: RequestTable) -> StepPlan | None:
    """Return one more token for each sequence of `running` that is not certain to end with it, or None if there is
    anything to decide. `table` and `view` are as before that step."""
    states = list(table)
    in_step = {run.seq_id for run in running.run}
    if len(states) != len(in_step) or any(s.id not in in_step or not s.is_decode for s in states):
        return None
    continuing = [s for s in states if not _ends(s, view.max_model_len)]
    if not continuing or _new_blocks(states, 1, view) + _new_blocks(continuing, 2, view) > view.free_blocks:
        return None
    order = {run.seq_id: i for i, run in enumerate(running.run)}
    continuing.sort(key=lambda s: order[s.id])
    return StepPlan(step_id, run=tuple(Run(s.id, 1) for s in continuing), ahead=True)


def _ends(state: RequestState, max_model_len: int) -> bool:
    """Return whether the token of the running step is its last one. (A stop token may end it as well.)"""
    num_outputs = len(state.output_token_ids) + 1
    return num_outputs >= state.request.sampling.max_tokens or state.num_tokens + 1 >= max_model_len


def _new_blocks(states: list[RequestState], num_tokens: int, view: EngineView) -> int:
    """Count the blocks that the last of `num_tokens` more tokens of each sequence takes."""
    size = view.block_size
    return sum(
        blocks_for(s.num_computed_tokens + num_tokens, size) - blocks_for(s.num_computed_tokens + num_tokens - 1, size)
        for s in states
    )
