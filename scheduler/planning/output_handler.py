"""The handler of step results: it applies new tokens, ends and failures to the request states.

Writes to request states and to the report on the step. Knows results and request states; does not know plans or
budgets. `SchedulerCore` owns the handler.
"""

from collections import Counter

from engine.interface import FinishReason, SequenceOutput, StepResult
from scheduler.planning import step_report
from scheduler.planning.engine_state import EngineState
from scheduler.planning.request_table import RequestTable
from scheduler.planning.step_report import Reaction, StepReport
from scheduler.request import EventKind, TokenEvent
from scheduler.request_state import RequestState, Sample, Status


class OutputHandler:
    """The part of the core that applies the results of steps.

    It adds finished and failed requests to `counts`, the counters of the core.
    """

    def __init__(self, table: RequestTable, counts: Counter[str], worker_id: str = "") -> None:
        self._table = table
        self._counts = counts
        self._worker_id = worker_id

    def apply(
        self, result: StepResult, engine: EngineState, bulk_total_s: float, now: float, report: StepReport
    ) -> None:
        """Apply the result of a step to the request states, and add its consequences to `report`.

        `bulk_total_s` is the engine time that bulk has used since the start. The results of abandoned sequences are
        ignored. If an abandoned sequence has ended, it is removed from the sequences to abort.
        """
        states = self._table.states
        for seq_id, num_shared in result.shared_blocks:
            if seq_id in states and not engine.is_abandoned(seq_id):
                states[seq_id].num_shared_blocks = num_shared
        for output in result.outputs:
            if not engine.is_abandoned(output.seq_id):
                self.take(states[output.seq_id], output, bulk_total_s, now, report)
            elif output.finish_reason is not None:
                engine.forget_abandoned(output.seq_id)
        for failure in result.failures:
            if engine.is_abandoned(failure.seq_id):
                engine.forget_abandoned(failure.seq_id)
            else:
                state = states[failure.seq_id]
                self._table.remove(state)
                self.fail(state, failure.reason, now, report)

    def fail(
        self,
        state: RequestState,
        error: str,
        now: float,
        report: StepReport,
        kind: EventKind = EventKind.FAILED,
        code: str = "",
    ) -> None:
        """End a request as failed. The caller has removed it from the table or never added it.

        `error` is a sentence for the user, and `code` its reason for programs, if they must know it. `kind` is
        `UNAVAILABLE` if the same request may succeed later.
        """
        state.move(Status.FAILED)
        self._counts["failed"] += 1
        _end(state, step_report.failed_event(state, error, kind, code), "failed", now, report)

    def take(
        self, state: RequestState, output: SequenceOutput, bulk_total_s: float, now: float, report: StepReport
    ) -> None:
        """Apply the newly computed tokens of one request, and its end."""
        state.num_computed_tokens = output.num_computed_tokens
        if state.num_cached_tokens is None:
            # A sequence that is continued also looks for its output in the prefix cache.
            state.num_cached_tokens = min(output.num_cached_tokens, len(state.request.prompt_token_ids))
            report.lookups += filter(None, [step_report.lookup(state)])
        state.output_token_ids.extend(output.token_ids)
        state.logprobs.extend(output.logprobs)
        state.prompt_logprobs.extend(output.prompt_logprobs)
        self._table.update(state)
        if output.token_ids:
            if state.awaits_first_token and state.reaction_steps is not None:
                report.reactions.append(Reaction(state.tier.name, state.reaction_steps))
            report.samples += state.time_token(now, bulk_total_s)
        if output.finish_reason is not None:
            self._finish(state, output.finish_reason, now, report)
        elif output.token_ids and step_report.is_due(state, now):
            report.events[state.request.reply_to].append(step_report.progress_event(state, now, self._worker_id))

    def _finish(self, state: RequestState, reason: FinishReason, now: float, report: StepReport) -> None:
        event = step_report.finished_event(state, reason, now, self._worker_id)
        if state.request.job_part and state.can_continue:  # its gateway may end before it has the event
            report.checkpoints.append(step_report.last_checkpoint(state))
        self._table.remove(state)
        state.move(Status.FINISHED)
        self._counts["finished"] += 1
        report.samples.append(Sample("e2e", state.tier.name, now - state.arrived_s))
        _end(state, event, reason.value, now, report)


def _end(state: RequestState, event: TokenEvent, reason: str, now: float, report: StepReport) -> None:
    state.ended_s = now
    report.events[state.request.reply_to].append(event)
    report.leases.append(state.lease)
    report.ended.append(step_report.ended(state, reason))
    if state.marks is not None:
        report.traced.append(state)
