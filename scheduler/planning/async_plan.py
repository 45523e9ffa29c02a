"""The plan behind the one that runs, made before its result is known: for a device that should not wait for the host.

Pure. It is made only where nothing is left to decide: every sequence there is decodes, all of them are in the step that
runs, and all may go on. Whatever else there may be to do waits for the result, and for `form_batch`.
"""

from engine.interface import Run, StepPlan, blocks_for
from scheduler.planning.kv_budget import EngineView
from scheduler.planning.request_table import RequestTable
from scheduler.request_state import RequestState


def async_plan(running: StepPlan, step_id: int, view: EngineView, table: RequestTable) -> StepPlan | None:
    """One more token for each sequence of `running` that does not end with it for certain. `table` and `view` are from
    before that step."""
    states = list(table)
    in_step = {run.seq_id for run in running.run}
    if len(states) != len(in_step) or any(s.id not in in_step or not s.is_decode for s in states):
        return None
    going_on = [s for s in states if not _ends(s, view.max_model_len)]
    if not going_on or _new_blocks(states, 1, view) + _new_blocks(going_on, 2, view) > view.free_blocks:
        return None
    order = {run.seq_id: i for i, run in enumerate(running.run)}
    going_on.sort(key=lambda s: order[s.id])
    return StepPlan(step_id, run=tuple(Run(s.id, 1) for s in going_on), ahead=True)


def _ends(state: RequestState, max_model_len: int) -> bool:
    """With the token that the running step gives it, if not by a stop token before."""
    num_outputs = len(state.output_token_ids) + 1
    return num_outputs >= state.request.sampling.max_tokens or state.num_tokens + 1 >= max_model_len


def _new_blocks(states: list[RequestState], num_tokens: int, view: EngineView) -> int:
    """That the last of `num_tokens` more tokens of each takes."""
    size = view.block_size
    return sum(
        blocks_for(s.num_computed_tokens + num_tokens, size) - blocks_for(s.num_computed_tokens + num_tokens - 1, size)
        for s in states
    )
