"""The drawings on the page of an experiment, grouped by section. Imports matplotlib."""

from collections.abc import Sequence

from bench.isolation import plots, plots_over_time
from bench.isolation.arms import Document
from bench.isolation.report import ARMS, OVER_TIME, Drawings
from bench.isolation.result import Result
from loadtest.reporting.record import Drawing
from scheduler.config import parse_tiers


def draw_experiment(result: Result) -> Drawings:
    first_slo = next(iter(result.slos.values()))
    by_arm = (
        Drawing(plots.latency_by_arm(result.arms, first_slo.ttft_ms), "First tokens"),
        Drawing(plots.harvest_by_arm(result.arms), "What interactive gets, and what bulk gets"),
    )
    return {ARMS: by_arm, OVER_TIME: _over_time(result)}


def _over_time(result: Result) -> tuple[Drawing, ...]:
    drawings = []
    if result.experiment.profile.factor != 1.0:
        drawings.append(Drawing(plots.attainment_over_time(result), "Within the SLO, all rounds"))
    shown = [parts[0] for parts in result.rounds.parts.values() if parts[0].arm.is_mixed]
    span_ms = plots_over_time.first_token_span_ms(shown, result.slos)
    top_rate = 1.1 * max((plots_over_time.bulk_rate(p, result.scenario)[1].max() for p in shown), default=1.0) or 1.0
    for part in shown:
        title = f"{part.arm.name}, {part.arm.title}"
        drawing = plots_over_time.arm_over_time(part, result.scenario, result.slos, span_ms, top_rate)
        drawings.append(Drawing(drawing, title, "Dashed: the SLO. A cross is a request that missed one."))
        tiers = _steered_tiers(part.arm.tiers)
        knobs = plots_over_time.knobs_over_time(part, tiers) if tiers else None
        if knobs is not None:
            drawings.append(Drawing(knobs, caption=f"{part.arm.name}: the controller's knobs, once a second."))
    return tuple(drawings)


def _steered_tiers(document: Document | None) -> Sequence[str]:
    """Return the names of the tiers that requests can ask for; empty if the controller moves no knobs."""
    if document is None or not parse_tiers(document).controller.feedback:
        return ()
    return [tier.name for tier in parse_tiers(document).by_priority if tier.service_tiers]
