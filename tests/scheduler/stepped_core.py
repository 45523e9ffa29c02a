"""A core and a modeled engine, stepped by hand, for tests of what one step does to the next."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from engine.interface import StepPlan
from engine.modeled.engine import ModeledEngine
from engine.step_time.cost import StepCost
from scheduler.holdings.report import Report
from scheduler.request import Claimed, Request, TokenEvent
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import FAST, NO_PERIOD, CheckedCore, make_core

T = TypeVar("T")


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never really waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine waits for something")


class SteppedCore:
    """A core and a modeled engine, stepped by hand. Each step moves the time by its length."""

    def __init__(
        self,
        core: CheckedCore | None = None,
        cost: StepCost = FAST,
        noise: float = 0.0,
        *,
        prefix_cache: bool = False,
        period: int = NO_PERIOD,
    ) -> None:
        self.core = core or make_core()
        self.now = 0.0
        self.engine = ModeledEngine(
            self.core._engine, self._pass, cost, noise, prefix_cache=prefix_cache, period=period
        )
        self.events: list[TokenEvent] = []
        self.reports: list[Report] = []
        self._fence = 0

    async def _pass(self, seconds: float) -> None:
        self.now += seconds

    @property
    def wall_ms(self) -> int:
        return EPOCH_MS + int(self.now * 1000)

    def accept(self, *requests: Request) -> None:
        claimed = [Claimed(r, self._fence + i) for i, r in enumerate(requests, 1)]
        self._fence += len(requests)
        self.core.held.accept(claimed, self.now, self.wall_ms)
        self._take(self.core.held.refuse(self.now))

    def submit(self) -> StepPlan:
        """Plan and submit a step."""
        plan = self.core.plan(self.now)
        if not plan.is_empty:
            self.engine.submit(plan)
        return plan

    def collect(self) -> Report:
        """Collect and apply the submitted step."""
        result = run_now(self.engine.collect())
        return self._take(self.core.apply(result, self.now))

    def step(self) -> StepPlan:
        plan = self.submit()
        if not plan.is_empty:
            self.collect()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until no work is left."""
        for _ in range(max_steps):
            if self.step().is_empty:
                return
        raise AssertionError("the work does not end")

    def tokens(self, request_id: str) -> list[int]:
        return [t for e in self.events if e.request_id == request_id for t in e.token_ids]

    def _take(self, report: Report) -> Report:
        self.reports.append(report)
        self.events += [e for events in report.events.values() for e in events]
        return report
