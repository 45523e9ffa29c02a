"""What the controller's tests are built from: a controller, what it observes, and its outer loop at its usual pace."""

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import TierBudget
from scheduler.control.controller import SLAController
from scheduler.control.feedback import Load
from scheduler.control.knobs import Decision
from scheduler.control.windows import UPDATE_S
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_tiers

COST = StepCost(step_s=0.01, prefill_token_s=0.0002, decode_s=0.0005)
QUICK = StepCost(step_s=0.0001, prefill_token_s=0.0002, decode_s=0.0002)
BULK = ("bulk", "batch")


def budgets_of(
    controller: SLAController,
    states: list[RequestState],
    now: float = 0.0,
    cost: StepCost = COST,
    left_s: float = NEVER_S,
) -> dict[str, TierBudget]:
    """`left_s` is what the delay accounts of `states` have left."""
    interactive = [s for s in states if s.tier.is_interactive]
    return dict(controller.budgets(interactive, cost, now, left_s).tiers)


def make_load(kv_usage: float = 0.0, held: dict[str, int] | None = None, **waiting: int) -> Load:
    return Load(kv_usage=kv_usage, held=held or {}, waiting=waiting)


def observe(
    controller: SLAController,
    kind: str,
    ms: float,
    count: int = 100,
    now: float = 0.0,
    bulk_ms: float = 0.0,
    own_ms: float = 0.0,
) -> None:
    for _ in range(count):
        controller.observe_latency("realtime", kind, ms / 1000, now, bulk_ms / 1000, own_ms / 1000)


def run_bulk(controller: SLAController, now: float = 0.0) -> None:
    """Bulk has just used the engine: it took part in what is missed."""
    controller.observe_step(0.1, 0.1, {"bulk": 0.1}, [], now, 0.0)


class OuterLoop:
    """Calls `update` at its pace and returns the decisions."""

    def __init__(self, tiers: TierSet | None = None, now: float = 0.0) -> None:
        self.controller = SLAController(tiers or make_tiers())
        self.now = now

    def update(self, load: Load, rounds: int = 1) -> list[Decision]:
        """Return all decisions but those on `batch_tokens`, which follow the slots."""
        return [d for d in self.update_all(load, rounds) if d.knob != "batch_tokens"]

    def update_all(self, load: Load, rounds: int = 1) -> list[Decision]:
        decisions = []
        for _ in range(rounds):
            self.now += UPDATE_S
            decisions += self.controller.update(load, self.now)
        return decisions

    def batch_size(self, tier: str) -> int:
        return self.controller.outputs(self.now)[tier].batch_size

    def max_wait_ms(self, tier: str) -> float:
        return self.controller.outputs(self.now)[tier].max_wait_s * 1000

    def arrive(self, tier: str, per_s: float, seconds: float, load: Load | None = None) -> list[Decision]:
        """Let requests arrive evenly; return the decisions made meanwhile."""
        decisions = []
        for _ in range(int(seconds / UPDATE_S)):
            self.controller.observe_arrivals(tier, round(per_s * UPDATE_S))
            decisions += self.update(load or make_load())
        return decisions
