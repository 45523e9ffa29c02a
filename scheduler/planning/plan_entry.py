"""Enters a plan into the request states before it runs: who starts, resumes, runs, or loses its place."""

from engine.interface import PreemptionMode, StepPlan
from scheduler.planning.request_table import RequestTable
from scheduler.request_state import RequestState, Status


def enter_plan(plan: StepPlan, table: RequestTable, now: float) -> None:
    """Write `plan` into the states of `table`; the caller must execute it."""
    states = table.states
    for preempt in plan.preempt:
        _preempt(states[preempt.seq_id], preempt.mode, table)
    for seq_id in (*plan.resume, *(new.seq_id for new in plan.start)):
        states[seq_id].move(Status.RUNNING)
        table.file(states[seq_id])
    if plan.run:
        table.note_run([run.seq_id for run in plan.run])
    for run in plan.run:
        state = states[run.seq_id]
        state.last_step = plan.step_id
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now


def _preempt(state: RequestState, mode: PreemptionMode, table: RequestTable) -> None:
    if mode is PreemptionMode.PAUSE:
        state.move(Status.PAUSED)
    else:
        state.lose_blocks(Status.SWAPPED if mode is PreemptionMode.SWAP else Status.PREEMPTED)
        table.file(state)
