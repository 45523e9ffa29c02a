"""A step in flight or suspended: its sequences, its times, and how its time is divided among the tiers.

Knows the plan of the step and the predicted cost of its runs. `RunningStep` owns the steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.interface import SequenceOutput, StepEnd, StepPlan, StepResult
from engine.step_time.cost import StepWork
from scheduler.clock import NEVER_S
from scheduler.control.delay_account import DelayAccounts, InteractiveRun
from scheduler.deadlines import deadline_s
from scheduler.holdings.report import DraftUse
from scheduler.request_state import RequestState


@dataclass(slots=True)
class TrackedRun:
    """A sequence in a step. Nothing in it changes."""

    state: RequestState
    run_s: float  # predicted cost of its run
    for_min_share: bool  # the step serves the min share of its tier

    @property
    def may_wait(self) -> bool:
        """Whether the sequence may wait in a suspended step."""
        return not (self.state.is_protected or self.for_min_share)


@dataclass(slots=True)
class TrackedStep:
    """A submitted step whose result has not come yet."""

    plan: StepPlan
    num_computed: dict[str, int]  # number of computed tokens before the step, by sequence
    swaps: bool  # whether the step copies KV blocks to the host or back
    started_s: float  # time at which it began or was continued
    step_s: float  # predicted length of the whole step in seconds
    runs: Mapping[str, TrackedRun]  # by sequence
    runs_s: Mapping[str, float]  # predicted cost of the runs, by tier
    sequences: Mapping[str, int]  # number of sequences, by tier
    interactive: frozenset[str]  # the interactive tiers with sequences in the step
    itl_s: float = NEVER_S  # the shortest ITL SLO of these tiers
    accounts: Sequence[tuple[RequestState, float]] = ()  # requests that want a receipt, and the predicted costs
    expected_s: float = 0.0  # predicted length without a safety factor
    done_s: float = 0.0  # engine time that it has taken before it was suspended; 0: it never was
    delay_s: float = 0.0  # what of this time is entered into the delay accounts already
    num_beside: int = 0  # steps that were planned while it was suspended
    _num_drafted: dict[str, int] = field(init=False)  # number of drafted tokens, by sequence that has a draft

    def __post_init__(self) -> None:
        self._num_drafted = {run.seq_id: len(run.draft) for run in self.plan.run if run.draft}

    def progress_s(self, now: float) -> float:
        """Return how many seconds of the step are done at `now`, if the predicted length is right."""
        return min(self.step_s, max(0.0, self.done_s + now - self.started_s))

    @property
    def may_wait(self) -> bool:
        """Whether all of its sequences may wait."""
        return all(run.may_wait for run in self.runs.values())

    def suspends_for(self, newcomer: RequestState, newcomer_s: float, now: float) -> bool:
        """Return whether the step is suspended for `newcomer`, which takes `newcomer_s` seconds in a step of its own.

        A step whose sequences may all wait always is. In any other, the rest of those that may wait must take longer
        than the fixed cost of the newcomer's step, and the tokens of the others must still be in time.
        """
        waiting = [run for run in self.runs.values() if run.may_wait]
        if not waiting or any(run.state.priority >= newcomer.priority for run in waiting):
            return False
        if len(waiting) == len(self.runs):
            return True
        rest = 1 - self.progress_s(now) / self.step_s
        fixed_s = self.step_s - sum(self.runs_s.values())
        ends_s = now + newcomer_s + rest * self.step_s
        protected = (run.state for run in self.runs.values() if run.state.is_protected)
        are_in_time = all(deadline_s(state) >= ends_s for state in protected)
        return sum(run.run_s for run in waiting) * rest > fixed_s and are_in_time

    def work(self, result: StepResult) -> StepWork | None:
        """Return the work that the step did. Tokens found in the prefix cache do not count.

        Return None if the step's time does not depend on its work alone: blocks were copied, a sequence failed, the
        step was dropped, or no sequence ran.
        """
        if self.swaps or result.failures or result.end is StepEnd.DROPPED or not result.outputs:
            return None
        work = StepWork()
        for output in result.outputs:
            for num_tokens, start in self._tokens(output):
                work.add(num_tokens, start)
        return work

    def interactive_runs(self, result: StepResult) -> list[InteractiveRun]:
        """Return what the step computed of interactive requests."""
        found = ((self.runs[output.seq_id].state, output) for output in result.outputs if output.seq_id in self.runs)
        return [
            (state, *tokens) for state, output in found if state.tier.is_interactive for tokens in self._tokens(output)
        ]

    def drafts(self, result: StepResult) -> list[DraftUse]:
        """Return what became of the drafts in the step."""
        drafted = self._num_drafted
        outputs = (output for output in result.outputs if output.seq_id in drafted and output.token_ids)
        return [DraftUse(self.runs[o.seq_id].state, drafted[o.seq_id], len(o.token_ids) - 1) for o in outputs]

    def planned_interactive(self) -> list[InteractiveRun]:
        """Return what the step will compute of the interactive requests that yield to nobody."""
        runs = ((self.runs[run.seq_id].state, run.num_tokens, self.num_computed[run.seq_id]) for run in self.plan.run)
        return [run for run in runs if run[0].is_protected]

    @property
    def is_protected(self) -> bool:
        """Whether all sequences of the step are of interactive requests that yield to nobody."""
        return all(run.state.is_protected for run in self.runs.values())

    def note_cached(self, before: StepResult) -> None:
        """Correct the computed tokens of a step that was planned before the result of the step before it.

        It was not known then which tokens the prefix cache has.
        """
        for output in before.outputs:
            if output.num_cached_tokens and output.seq_id in self.num_computed:
                self.num_computed[output.seq_id] = output.num_computed_tokens

    def _tokens(self, output: SequenceOutput) -> Sequence[tuple[int, int]]:
        """Return how many tokens were computed for an output, and how many there were before.

        A decode with a draft counts as a decode for each of its tokens, accepted or not.
        """
        start = self.num_computed[output.seq_id] + output.num_cached_tokens
        if num_drafted := self._num_drafted.get(output.seq_id):
            return [(1, start + i) for i in range(1 + num_drafted)]
        return [(output.num_computed_tokens - start, start)]

    def used_s(self, elapsed_s: float) -> dict[str, float]:
        """Return the engine time that each tier used: `elapsed_s`, shared in proportion to predicted costs.

        The predicted cost of a tier is the cost of its runs plus its part of the step's fixed cost. The fixed cost is
        divided among the tiers with sequences that must not wait, or among all if there are no such tiers.
        """
        used_s = dict(self.runs_s)
        payers = {run.state.tier.name for run in self.runs.values() if not run.may_wait} or set(used_s)
        fixed_s, payers_s = self.step_s - sum(self.runs_s.values()), sum(used_s[tier] for tier in payers)
        for tier in payers:
            used_s[tier] += fixed_s * (used_s[tier] / payers_s if payers_s else 1 / len(payers))
        scale = elapsed_s / sum(used_s.values()) if used_s else 0.0
        return {tier: seconds * scale for tier, seconds in used_s.items()}

    def charges(self) -> Iterator[tuple[RequestState, float]]:
        """Return each interactive request with the engine time that it takes, as predicted.

        This is the cost of its run, and its part of the step's fixed cost, which is divided among those that yield to
        nobody, or among all if there are none.
        """
        runs = [run for run in self.runs.values() if run.state.tier.is_interactive]
        payers_s = sum(run.run_s for run in runs if run.state.is_protected)
        fixed_s = self.step_s - sum(self.runs_s.values())
        for run in runs:
            pays = run.state.is_protected or not payers_s
            yield run.state, run.run_s + pays * fixed_s * run.run_s / (payers_s or sum(self.runs_s.values()) or 1.0)

    def interactive_s(self, elapsed_s: float) -> float:
        """Return the engine time that the interactive tiers would have taken from urgent bulk.

        This is the cost of their runs, and the fixed cost of as much of a step as this one is long, if bulk makes steps
        as long as the ITL SLO allows. `used_s` charges them the whole fixed cost, so that a few chats without bulk use
        most of the engine by its count.
        """
        if not self.interactive:
            return 0.0
        runs_s = sum(self.runs_s[tier] for tier in self.interactive)
        fixed_s = self.step_s - sum(self.runs_s.values())
        return min(elapsed_s, elapsed_s / self.step_s * (runs_s + fixed_s * min(1.0, elapsed_s / self.itl_s)))

    @property
    def others_share(self) -> float:
        """The share of the step by which bulk and what yields make it longer, as predicted."""
        others_s = sum(run.run_s for run in self.runs.values() if not run.state.is_protected)
        return others_s / self.step_s if others_s < sum(self.runs_s.values()) else 1.0

    @property
    def has_bulk(self) -> bool:
        return bool(self.runs_s.keys() - self.interactive)

    def enter(
        self, accounts: DelayAccounts, runs: Sequence[InteractiveRun], result: StepResult, overhead_s: float
    ) -> None:
        """Enter the finished step into the delay accounts. `runs` are its interactive runs."""
        if self.is_protected and not self.done_s:
            accounts.add_step(runs, result.elapsed_s, overhead_s, is_typical=self.work(result) is not None)
        else:
            protected = [run for run in runs if run[0].is_protected]
            accounts.add_shared_step(protected, self.done_s - self.delay_s + result.elapsed_s, overhead_s)

    def charge(self, used_s: Mapping[str, float]) -> None:
        """Divide the engine time that each tier used among its sequences, in proportion to predicted costs."""
        for state, run_s in self.accounts:
            runs_s = self.runs_s[state.tier.name]
            if runs_s > 0:
                state.engine_s += used_s.get(state.tier.name, 0.0) * run_s / runs_s
