"""Delay accounts: how long bulk has delayed each interactive request, and how long it may delay it further.

With a `max_slowdown` of s, an answer may take s times as long as without bulk. So a request's account earns s − 1 times
the time that the request would have taken alone, and pays every second by which bulk has made a step longer since its
arrival. What is left, with what the next step earns in any case, is what bulk may add to that step. Every error of a
prediction is paid back by later steps, so that the slowdown is right at the end of the answer.

Other interactive requests are left out of the time alone: whoever is slowed down meets more of them, in the same
proportion. The time that a step would have taken without bulk is learned from the steps that had no bulk.
"""

from collections.abc import Iterable, Sequence

from engine.step_time.cost import StepWork
from engine.step_time.kind import SHORTEST_S
from engine.step_time.model import StepTimeModel
from scheduler.clock import NEVER_S
from scheduler.request_state import RequestState

InteractiveRun = tuple[RequestState, int, int]  # the request, and the numbers of its new and of its earlier tokens


class DelayAccounts:
    """The accounts of a worker's interactive requests. Times are seconds of engine and host together."""

    def __init__(self, step_time: StepTimeModel | None = None) -> None:
        """`step_time` predicts steps without bulk; None: the accounts learn it."""
        self.step_time = step_time or StepTimeModel()
        self._fixed_s = 0.0  # total time without bulk that no single request needs: the fixed costs of steps
        self._delay_s = 0.0  # total time that bulk has added to steps

    def open(self, state: RequestState, running_s: float, bulk_share: float) -> None:
        """Open the account of a request that arrived `running_s` after the beginning of the running step.

        `bulk_share` is the share of this step that bulk makes. Without a running step, both are 0.
        """
        state.fixed_seen_s = self._fixed_s + (1 - bulk_share) * running_s
        state.delay_seen_s = self._delay_s + bulk_share * running_s
        state.own_s = 0.0

    def add_step(
        self, runs: Sequence[InteractiveRun], elapsed_s: float, overhead_s: float, *, is_typical: bool
    ) -> None:
        """Enter a step without bulk. The model learns from it if its time depends on its work alone (`is_typical`)."""
        if is_typical:
            self.step_time.observe(step_work(runs), elapsed_s)
        self._enter(runs, elapsed_s, overhead_s)

    def add_shared_step(self, runs: Sequence[InteractiveRun], elapsed_s: float, overhead_s: float) -> None:
        """Enter a step with bulk in it. If it has no interactive `runs`, all of it is a delay."""
        if not runs:
            self.add_delay(elapsed_s + overhead_s)
            return
        alone_s = min(elapsed_s, self.step_time.predict(step_work(runs)))
        self._delay_s += elapsed_s - alone_s
        self._enter(runs, alone_s, overhead_s)

    def add_delay(self, seconds: float) -> None:
        """Enter time that is a delay for each request that is there."""
        self._delay_s += seconds

    @property
    def fixed_s(self) -> float:
        """The fixed cost of a step without bulk, which each request needs: what the next step earns in any case."""
        return self.step_time.cost(mixed=False).step_s

    def left_s(self, states: Iterable[RequestState], next_s: float = 0.0) -> float:
        """Return the time that bulk may add to the next step; inf if no request limits it.

        It is negative where bulk has delayed a request too much. `next_s` counts as time alone already: without it, a
        request that has not run yet leaves nothing. As long as few decodes without bulk are known, this also holds for
        one that has not decoded yet. Requests that await their grammars wait for the host.
        """
        left_s, learns_decodes = NEVER_S, not self.step_time.knows_decodes
        for state in states:
            if state.tier.max_slowdown is not None and not state.awaits_grammar:
                alone_s = self._fixed_s - state.fixed_seen_s + state.own_s + next_s
                delay_s = self._delay_s - state.delay_seen_s
                left_s = min(left_s, (state.tier.max_slowdown - 1) * alone_s - delay_s)
                if learns_decodes and state.num_new_tokens <= 1:
                    left_s = min(left_s, 0.0)
        return left_s

    def left_after_s(
        self,
        states: Iterable[RequestState],
        runs: Sequence[InteractiveRun],
        elapsed_s: float,
        next_s: float = 0.0,
        *,
        is_protected: bool,
    ) -> float:
        """Return what `left_s` will be after a step with these `runs`, if it takes `elapsed_s` seconds.

        `is_protected` says that it has no bulk.
        """
        fixed_s, delay_s, own_s = self._fixed_s, self._delay_s, [state.own_s for state, _, _ in runs]
        if is_protected:
            self._enter(runs, elapsed_s, 0.0)
        else:
            self.add_shared_step(runs, elapsed_s, 0.0)
        left_s = self.left_s(states, next_s)
        self._fixed_s, self._delay_s = fixed_s, delay_s
        for (state, _, _), before_s in zip(runs, own_s, strict=True):
            state.own_s = before_s
        return left_s

    def _enter(self, runs: Sequence[InteractiveRun], alone_s: float, overhead_s: float) -> None:
        """Divide the time without bulk among the requests in proportion to predicted costs."""
        cost = self.step_time.cost(mixed=step_work(runs).is_mixed)
        runs_s = [cost.run(num_tokens, context) for _, num_tokens, context in runs]
        scale = alone_s / max(cost.step(sum(runs_s)), SHORTEST_S)  # 0 where the first steps say too little
        self._fixed_s += max(0.0, alone_s - scale * sum(runs_s)) + overhead_s
        for (state, _, _), run_s in zip(runs, runs_s, strict=True):
            state.own_s += scale * run_s


def step_work(runs: Sequence[InteractiveRun]) -> StepWork:
    work = StepWork()
    for _, num_tokens, context in runs:
        work.add(num_tokens, context)
    return work
