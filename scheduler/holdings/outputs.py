"""The handler of step results: it applies new tokens, ends and failures to the request states.

Writes to request states and to the report on the step. Knows results and request states; does not know plans or
budgets. `StepCore` owns the handler.
"""

from collections import Counter

from engine.interface import FinishReason, SequenceOutput
from scheduler.holdings import report as reports
from scheduler.holdings.report import Reaction, Report
from scheduler.holdings.request_table import RequestTable
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

    def fail(
        self,
        state: RequestState,
        error: str,
        now: float,
        report: Report,
        kind: EventKind = EventKind.FAILED,
        code: str = "",
    ) -> None:
        """End a request as failed. The caller has removed it from the table or never added it.

        `error` is a sentence for the user, and `code` its reason for programs, if they must know it. `kind` is
        `UNAVAILABLE` if the same request may succeed later.
        """
        state.move(Status.FAILED)
        self._counts["failed"] += 1
        _end(state, reports.failed_event(state, error, kind, code), "failed", now, report)

    def add(self, state: RequestState, output: SequenceOutput, bulk_total_s: float, now: float, report: Report) -> None:
        """Apply the newly computed tokens of one request, and its end."""
        state.num_computed_tokens = output.num_computed_tokens
        if state.num_cached_tokens is None:
            # A sequence that is continued also looks for its output in the prefix cache.
            state.num_cached_tokens = min(output.num_cached_tokens, len(state.request.prompt_token_ids))
            report.lookups += filter(None, [reports.lookup(state)])
        state.output_token_ids.extend(output.token_ids)
        state.logprobs.extend(output.logprobs)
        state.prompt_logprobs.extend(output.prompt_logprobs)
        state.vector = output.vector
        state.num_prompt_tokens = output.num_prompt_tokens
        self._table.update(state)
        if output.token_ids:
            if state.awaits_first_token and state.reaction_steps is not None:
                report.reactions.append(Reaction(state.tier.name, state.reaction_steps))
            report.samples += state.time_token(now, bulk_total_s)
            report.tokens[state.tier.name] += len(output.token_ids)
        if output.finish_reason is not None:
            self._finish(state, output.finish_reason, now, report)
        elif output.token_ids and reports.is_due(state, now):
            report.events[state.request.reply_to].append(reports.progress_event(state, now, self._worker_id))

    def _finish(self, state: RequestState, reason: FinishReason, now: float, report: Report) -> None:
        event = reports.finished_event(state, reason, now, self._worker_id)
        if state.request.job_part and state.can_continue:  # its gateway may end before it has the event
            report.checkpoints.append(reports.last_checkpoint(state))
        self._table.remove(state)
        state.move(Status.FINISHED)
        self._counts["finished"] += 1
        report.samples.append(Sample("e2e", state.tier.name, now - state.arrived_s))
        _end(state, event, reason.value, now, report)


def _end(state: RequestState, event: TokenEvent, reason: str, now: float, report: Report) -> None:
    state.ended_s = now
    report.events[state.request.reply_to].append(event)
    report.leases.append(state.lease)
    report.ended.append(reports.ended(state, reason))
    if state.marks is not None:
        report.traced.append(state)
