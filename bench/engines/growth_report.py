"""The report of a growth run, as a record. Computes ratios and medians; runs nothing."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.engines.growth import Growth
from bench.engines.idle_cost import IdleCost
from loadtest.reporting.formats import ABSENT
from loadtest.reporting.record import Record, Section, Table


def growth_record(growth: Growth, written: Sequence[Path]) -> Record:
    """Return the report of a growth run as a record. The text ends with the list of the `written` files."""
    return Record(
        sections=[
            Section(table=_points_table(growth)),
            Section("an interactive step beside bulk that does nothing (medians)", _idle_table(growth.idle)),
            *_profiles(growth.idle),
            Section(notes=tuple(f"written: {path}" for path in written)),
        ],
        data=_growth_as_dict(growth),
    )


def _points_table(growth: Growth) -> Table:
    sizes = ("axis", "model", "streams", "context")
    header = (*sizes, "ms a step", "roofline ms", "of the roofline", "tok/s", "prefill tok/s")
    rows = [
        (
            point.axis,
            point.shape,
            str(point.streams),
            str(point.context),
            f"{1e3 * point.step_s:.2f}",
            ABSENT if point.roofline_s is None else f"{1e3 * point.roofline_s:.2f}",
            ABSENT if point.roofline_s is None else f"{point.roofline_s / point.step_s:.0%}",
            f"{point.tokens_per_s:.1f}",
            f"{point.prefill_tokens_per_s:.0f}",
        )
        for point in growth.points
    ]
    return Table.of(header, rows)


def _idle_table(costs: Sequence[IdleCost]) -> Table:
    header = ("bulk", "held", "resident", "claim ms", "plan ms", "engine ms", "apply ms", "sum ÷ none")
    rows = []
    for cost in costs:
        times = cost.times
        medians = [f"{1e3 * median(part):.3f}" for part in (times.claim, times.plan, times.engine, times.apply)]
        over = _over_none(cost, costs)
        rows.append((cost.kind, str(cost.idle), str(cost.resident), *medians, f"{over:.2f}"))
    return Table.of(header, rows)


def _profiles(costs: Sequence[IdleCost]) -> list[Section]:
    """Return the profiles of planning with the largest number of idle requests, one for each kind."""
    largest = [cost for cost in costs if cost.wanted == max(c.wanted for c in costs)]
    return [
        Section(f"planning beside {cost.idle} {cost.kind} bulk requests:", notes=(cost.profile,)) for cost in largest
    ]


def _over_none(cost: IdleCost, costs: Sequence[IdleCost]) -> float:
    """Return the ratio of two median step times: that of `cost` ÷ that with the fewest idle requests (zero).

    Only entries of `costs` with the same kind as `cost` are compared.
    """
    least = min((c for c in costs if c.kind == cost.kind), key=lambda c: c.wanted)
    return median(cost.times.steps) / median(least.times.steps)


def _growth_as_dict(growth: Growth) -> dict[str, Any]:
    return {
        "points": [asdict(point) | {"tokens_per_s": point.tokens_per_s} for point in growth.points],
        "idle": [asdict(cost) | {"over_none": _over_none(cost, growth.idle)} for cost in growth.idle],
    }
