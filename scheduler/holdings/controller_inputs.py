"""The inputs of the SLA controller: arrivals, finished steps, latencies, ended requests, urgency and the load.

Reads the request table and the reports on steps, and passes the observations to the controller. Decides nothing.
`StepCore` owns it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from scheduler.config import Tier
from scheduler.control.controller import SLAController
from scheduler.control.feedback import Load
from scheduler.control.knobs import Decision
from scheduler.deadlines import boosted_priorities, count_missing, urgencies
from scheduler.holdings.report import Report
from scheduler.holdings.request_table import RequestTable

LATENCIES = ("ttft", "itl", "service")  # the kinds of sample that the controller learns from


class ControllerInputs:
    """The part of the core that passes observations to the SLA controller."""

    def __init__(self, controller: SLAController, table: RequestTable) -> None:
        self._controller = controller
        self._table = table
        self._queued: Mapping[str, int] = {}  # number of requests in the queue at the newest review, by tier
        self._claimed: Counter[str] = Counter()  # number of requests claimed since the newest review, by tier
        # Number of bulk requests that cannot end by their deadlines any more, by tier, at the newest review.
        self.missing_deadlines: Mapping[str, int] = {}

    def note_claimed(self, tier: str) -> None:
        self._claimed[tier] += 1

    def tell_step(self, report: Report, elapsed_s: float, overhead_s: float, now: float) -> None:
        """Tell the controller about a step or a part of it: its tiers' use of engine time, and latencies that it ended.

        `elapsed_s` is the engine's time. `overhead_s` is the time that the host needed in addition.
        """
        if report.sequences:
            self._controller.observe_batch(report.sequences)
        if report.used_s:
            wanting = {*report.used_s, *self._table.tiers_held(), *(t for t, depth in self._queued.items() if depth)}
            self._controller.observe_step(elapsed_s, report.planned_s, report.used_s, wanting, now, overhead_s)
        self.tell_requests(report, now)

    def tell_requests(self, report: Report, now: float) -> None:
        """Tell the controller about the latencies and the ended requests in `report`."""
        for sample in report.samples:
            if sample.kind in LATENCIES and not sample.yielded:
                self._controller.observe_latency(
                    sample.tier, sample.kind, sample.seconds, now, sample.bulk_s, sample.own_s
                )
        for end in report.ended:
            self._controller.observe_end(end.tier, end.met_slo, now)

    def review(
        self, tiers: tuple[Tier, ...], depths: Mapping[str, int], kv_usage: float, step_time: StepTimeModel, now: float
    ) -> list[Decision]:
        """Boost urgent requests, let the controller move its knobs, and return the controller's decisions.

        `depths` is the number of requests in the queue, by tier.
        """
        self._count_arrivals({tier.name: depths.get(tier.name, 0) for tier in tiers})
        self._boost_urgent(tiers, step_time.cost(), now)
        return self._controller.update(self._load(kv_usage, step_time.cost(mixed=False)), now)

    def _count_arrivals(self, queued: Mapping[str, int]) -> None:
        """Tell the controller how many requests have arrived since the last review.

        The number of arrivals is the number of claims plus the growth of the queue. Claims by other workers are not
        known here, so they are not counted as arrivals.
        """
        for tier, depth in queued.items():
            arrived = self._claimed[tier] + depth - self._queued.get(tier, 0)
            self._controller.observe_arrivals(tier, max(0, arrived))
        self._claimed.clear()
        self._queued = queued

    def _boost_urgent(self, tiers: tuple[Tier, ...], cost: StepCost, now: float) -> None:
        """Raise the priority of requests that are near their deadline, have one of their own or have waited too long.

        Also tell the controller the urgency of each tier.
        """
        all_urgent: list[str] = []
        self.missing_deadlines = {
            tier.name: count_missing(self._table.of_tier(tier.name), cost, now) for tier in tiers if tier.urgent_ms
        }
        for tier in tiers:
            urgent = urgencies(tier, self._table.of_tier(tier.name), cost, now)
            self._controller.set_urgency(tier.name, max(urgent.values(), default=0.0))
            all_urgent += urgent
        self._table.boost(boosted_priorities(tiers, self._table, all_urgent, now))

    def _load(self, kv_usage: float, cost: StepCost) -> Load:
        """Return the present load. `cost` is the predicted cost of a step that has only decodes."""
        return Load(
            kv_usage=kv_usage,
            held={tier: self._table.count(tier) for tier in self._queued},
            waiting=self._queued,
            step_s=cost.step_s,
            decodes_s=self._decodes_s(cost),
        )

    def _decodes_s(self, cost: StepCost) -> dict[str, float]:
        """Return the predicted length of a step that has only the decodes of one tier, for each interactive tier.

        Tiers without decodes are left out.
        """
        work_s: defaultdict[str, float] = defaultdict(float)
        for state in self._table.interactive():
            if state.is_decode:
                work_s[state.tier.name] += cost.decode(state.num_computed_tokens)
        return {tier: cost.step(seconds) for tier, seconds in work_s.items()}
