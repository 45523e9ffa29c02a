"""What the SLA controller is told: arrivals, finished steps, latencies, ends, urgency and the load.

Reads the request table and the reports of steps; decides nothing. Owner: `SchedulerCore`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from engine.interface import EngineInfo
from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from scheduler.config import Tier
from scheduler.control.controller import SLAController
from scheduler.control.feedback import Load
from scheduler.control.knobs import Decision
from scheduler.deadlines import age_share, boosted_priority, urgencies
from scheduler.planning.request_table import RequestTable
from scheduler.planning.step_report import StepReport

LATENCIES = ("ttft", "itl", "service")  # the kinds of sample that the controller learns from


class ControllerInputs:
    def __init__(self, controller: SLAController, table: RequestTable, engine: EngineInfo) -> None:
        self._controller = controller
        self._table = table
        self._engine = engine
        self._queued: Mapping[str, int] = {}  # requests in the queue, by tier, at the newest review
        self._claimed: Counter[str] = Counter()  # by tier, since then

    def note_claimed(self, tier: str) -> None:
        self._claimed[tier] += 1

    def tell_step(self, report: StepReport, elapsed_s: float, overhead_s: float, now: float) -> None:
        """Tell of a finished step, which took the engine `elapsed_s` and the host `overhead_s` more."""
        if report.sequences:
            wanting = {*report.sequences, *self._table.tiers_held(), *(t for t, depth in self._queued.items() if depth)}
            self._controller.observe_step(elapsed_s, report.used_s, wanting, now, overhead_s)
        self.tell_requests(report, now)

    def tell_requests(self, report: StepReport, now: float) -> None:
        """Tell of the latencies and ends of requests."""
        for sample in report.samples:
            if sample.kind in LATENCIES:
                self._controller.observe_latency(sample.tier, sample.kind, sample.seconds, now, sample.bulk_s)
        for end in report.ended:
            self._controller.observe_end(end.tier, end.met_slo, max(0, end.output_tokens - 1), now)

    def review(
        self, tiers: tuple[Tier, ...], depths: Mapping[str, int], kv_usage: float, step_time: StepTimeModel, now: float
    ) -> list[Decision]:
        """Boost urgent requests and let the controller move its knobs; return its decisions. `depths`: requests in the
        queue, by tier."""
        self._count_arrivals({tier.name: depths.get(tier.name, 0) for tier in tiers})
        self._boost_urgent(tiers, step_time.cost(), now)
        held = sum(s.blocks_held(self._engine.block_size) for s in self._table.interactive())
        self._controller.observe_blocks(held, self._engine.num_blocks)
        return self._controller.update(self._load(kv_usage, step_time.cost(mixed=False), now), now)

    def _count_arrivals(self, queued: Mapping[str, int]) -> None:
        """Requests that were claimed, or that made the queue longer, have arrived. Claims of other workers are not
        seen."""
        for tier, depth in queued.items():
            arrived = self._claimed[tier] + depth - self._queued.get(tier, 0)
            self._controller.observe_arrivals(tier, max(0, arrived))
        self._claimed.clear()
        self._queued = queued

    def _boost_urgent(self, tiers: tuple[Tier, ...], cost: StepCost, now: float) -> None:
        """Find the requests whose deadline is near, or that have waited for too long."""
        boosted: list[str] = []
        for tier in tiers:
            urgent = urgencies(tier, self._table.of_tier(tier.name), cost, now)
            self._controller.set_urgency(tier.name, max(urgent.values(), default=0.0))
            boosted += urgent
        self._table.boost(boosted, boosted_priority(tiers))

    def _load(self, kv_usage: float, cost: StepCost, now: float) -> Load:
        """Return the load as of `now`. `cost`: of a step of decodes only."""
        return Load(
            kv_usage=kv_usage,
            held={tier: self._table.count(tier) for tier in self._queued},
            waiting=self._queued,
            age_share=age_share(self._table.interactive(), now),
            step_s=cost.step_s,
            decodes_s=self._decodes_s(cost),
        )

    def _decodes_s(self, cost: StepCost) -> dict[str, float]:
        """Return by interactive tier how long a step of all its decodes is predicted to take, with nothing else."""
        work_s: defaultdict[str, float] = defaultdict(float)
        for state in self._table.interactive():
            if state.is_decode:
                work_s[state.tier.name] += cost.decode(state.num_computed_tokens)
        return {tier: cost.step(seconds) for tier, seconds in work_s.items()}
