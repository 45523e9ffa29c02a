"""Async scheduling: the next plan is made before the result of the running step is known.

So the device does not wait for the host between two steps. Such a plan is made only if nothing is left to decide: all
sequences that the worker holds are decoding in the running step, and there are blocks for their next tokens. In all
other cases, the worker waits for the result and calls `form_batch`. All functions are pure.
"""

from engine.interface import Run, StepPlan, blocks_for
from scheduler.holdings.request_table import RequestTable
from scheduler.planning.kv_budget import EngineView
from scheduler.request_state import RequestState


def async_plan(running: StepPlan, step_id: int, view: EngineView, table: RequestTable) -> StepPlan | None:
    """Return the plan that follows `running`: one more token for each of its sequences that can continue.

    Sequences that are certain to end with `running` are left out. Return None if there is anything to decide. `table`
    and `view` show the state before the result of `running`.
    """
    states = list(table)
    in_step = {run.seq_id for run in running.run}
    if len(states) != len(in_step) or any(s.id not in in_step or not s.is_decode for s in states):
        return None
    continuing = [s for s in states if not s.ends_with(1, view.max_model_len)]
    if not continuing or _new_blocks(states, 1, view) + _new_blocks(continuing, 2, view) > view.free_blocks:
        return None
    order = {run.seq_id: i for i, run in enumerate(running.run)}
    continuing.sort(key=lambda s: order[s.id])
    return StepPlan(step_id, run=tuple(Run(s.id, 1) for s in continuing), ahead=True)


def _new_blocks(states: list[RequestState], num_tokens: int, view: EngineView) -> int:
    """Return the number of sequences that need a new KV block for the last one of their next `num_tokens` tokens."""
    size = view.block_size
    return sum(
        blocks_for(s.num_computed_tokens + num_tokens, size) - blocks_for(s.num_computed_tokens + num_tokens - 1, size)
        for s in states
    )
