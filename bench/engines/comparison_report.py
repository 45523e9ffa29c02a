"""The report of a comparison of engines, as a record. Computes means, ratios and shares; runs nothing.

Systems are compared within each round, since a slow round is slow for all systems. One ratio is computed for each
round. The mean of the ratios' logarithms has a 95 % Student interval; mean and interval are then converted back.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from bench.engines.comparison import Comparison, Sample
from bench.engines.roofline import ModelShape, Peaks, job_roofline_s, measured_step
from bench.engines.work import WorkKind
from loadtest.estimates import Estimate
from loadtest.reporting.formats import ABSENT
from loadtest.reporting.record import Record, Section, Table

OURS = "tidegate"
NOISY_IDLE_SHARE = 0.05  # share of a core; a system that takes more while it is idle disturbed the other systems


class ComparisonReport:
    """The report of a comparison. Without `shape` or `peaks`, it has no roofline and no shares of it."""

    def __init__(self, comparison: Comparison, shape: ModelShape | None, peaks: Peaks | None) -> None:
        self._comparison = comparison
        self._shape = shape
        self._peaks = peaks

    def as_dict(self) -> dict[str, Any]:
        comparison = self._comparison
        return {
            "jobs": [self._job_row(work, streams, system) for work, streams, system in self._cells()],
            "steps": [self._step_row(streams, system) for streams, system in self._step_cells()],
            "agreement": [
                {"systems": list(pair), "share": comparison.agreement(*pair), "tokens": total}
                for pair, total in comparison.compared_tokens.items()
            ],
            "settings": comparison.settings,
            "unavailable": comparison.unavailable,
            "idle_cpu_shares": comparison.idle_cpu_shares,
            "warnings": self.warnings(),
            "rooflines": self._roofline(),
        }

    def record(self) -> Record:
        data = self.as_dict()
        sections = [
            Section("throughput; prefill counts prompt tokens too", _jobs_table(data["jobs"])),
            Section("one decode step with all streams", _steps_table(data["steps"])),
            Section(facts=tuple(self._comparison.settings.items()), notes=self._notes()),
        ]
        return Record(sections=sections, data=data, warnings=data["warnings"])

    def _notes(self) -> tuple[str, ...]:
        notes = [f"NOT MEASURED: {name}: {reason}" for name, reason in self._comparison.unavailable.items()]
        if self._peaks is not None:
            gigabytes, gigaflops = self._peaks.bytes_per_s / 1e9, self._peaks.flops_per_s / 1e9
            rates = f"{gigabytes:.1f} GB/s and {gigaflops:.0f} GFLOP/s of the dtype's products"
            notes.append(f"roofline from {rates}, the higher of two probes before and after the run")
        return tuple(notes)

    def warnings(self) -> list[str]:
        return [
            f"{name} took {share:.0%} of a core while others were measured"
            for name, share in self._comparison.idle_cpu_shares.items()
            if share is not None and share > NOISY_IDLE_SHARE and name not in self._comparison.unavailable
        ]

    # -- jobs --------------------------------------------------------------------------------------------------

    def _cells(self) -> list[tuple[WorkKind, int, str]]:
        return sorted(
            {(s.work, s.streams, s.system) for s in self._comparison.samples},
            key=lambda cell: (list(WorkKind).index(cell[0]), cell[1], self._comparison.systems.index(cell[2])),
        )

    def _samples(self, work: WorkKind, streams: int, system: str) -> dict[int, Sample]:
        """Return the samples of one kind of work, number of streams and system, by round."""
        found = (s for s in self._comparison.samples if (s.work, s.streams, s.system) == (work, streams, system))
        return {sample.round: sample for sample in found}

    def _job_row(self, work: WorkKind, streams: int, system: str) -> dict[str, Any]:
        own, ours = self._samples(work, streams, system), self._samples(work, streams, OURS)
        both = sorted(own.keys() & ours.keys())
        rates = [own[r].tokens_per_s for r in both]
        agreement = None if system == OURS else self._comparison.agreement(OURS, system)
        return {
            "work": work.value,
            "streams": streams,
            "system": system,
            "tokens_per_s": _estimate(geometric_mean([s.tokens_per_s for s in own.values()])),
            "ours_over_it": _ratio([ours[r].tokens_per_s for r in both], rates) if system != OURS else None,
            "share_of_roofline": self._share_of_roofline(own.values()),
            "agreement_with_ours": agreement,
            "rounds": [{"round": r, "tokens": s.tokens, "elapsed_s": s.elapsed_s} for r, s in sorted(own.items())],
        }

    def _share_of_roofline(self, samples: Iterable[Sample]) -> float | None:
        if self._shape is None or self._peaks is None:
            return None
        shape, peaks = self._shape, self._peaks
        return geometric_mean([job_roofline_s(s.job, shape, peaks) / s.elapsed_s for s in samples]).value

    # -- steps -------------------------------------------------------------------------------------------------

    def _step_cells(self) -> list[tuple[int, str]]:
        cells = {(s.streams, s.system) for s in self._comparison.steps}
        return sorted(cells, key=lambda cell: (cell[0], self._comparison.systems.index(cell[1])))

    def _step_row(self, streams: int, system: str) -> dict[str, Any]:
        times = [s.seconds for s in self._comparison.steps if (s.streams, s.system) == (streams, system)]
        positive = [seconds for seconds in times if seconds > 0]  # a tiny model's step time can be below the noise
        mean = geometric_mean(positive) if positive else None
        roofline_s = self._step_roofline_s(streams)
        return {
            "streams": streams,
            "system": system,
            "step_s": _estimate(mean) if mean else None,
            "roofline_s": roofline_s,
            "share_of_roofline": roofline_s / mean.value if mean and roofline_s is not None else None,
            "rounds": times,
        }

    def _step_roofline_s(self, streams: int) -> float | None:
        if self._shape is None or self._peaks is None:
            return None
        return measured_step(streams).roofline_s(self._shape, self._peaks)

    def _roofline(self) -> dict[str, Any] | None:
        if self._shape is None or self._peaks is None:
            return None
        steps = {
            streams: {"bytes": needs.num_bytes(self._shape), "flops": needs.num_flops(self._shape)}
            for streams in sorted({s.streams for s in self._comparison.steps})
            if (needs := measured_step(streams))
        }
        return {"peaks": asdict(self._peaks), "shape": asdict(self._shape), "decode_step": steps}


def _jobs_table(rows: Sequence[dict[str, Any]]) -> Table:
    header = ("work", "streams", "system", "tok/s", "ours ÷ it (95 %)", "of the roofline", "same tokens as ours")
    return Table.of(
        header,
        [
            (
                row["work"],
                str(row["streams"]),
                row["system"],
                f"{row['tokens_per_s']['value']:.1f}",
                _interval(row["ours_over_it"]),
                _percent(row["share_of_roofline"]),
                _percent(row["agreement_with_ours"]),
            )
            for row in rows
        ],
    )


def _steps_table(rows: Sequence[dict[str, Any]]) -> Table:
    header = ("streams", "system", "ms a step (95 %)", "roofline ms", "of the roofline")
    return Table.of(
        header,
        [
            (
                str(row["streams"]),
                row["system"],
                _interval(row["step_s"], 1e3),
                ABSENT if row["roofline_s"] is None else f"{1e3 * row['roofline_s']:.2f}",
                _percent(row["share_of_roofline"]),
            )
            for row in rows
        ],
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None] | None:
    return _estimate(paired_ratio(ours, theirs)) if ours else None


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    """Return the estimate as JSON. The infinite interval of a single round becomes null, since JSON has no infinity."""
    known = math.isfinite(estimate.high)
    return {
        "value": estimate.value,
        "low": estimate.low if known else None,
        "high": estimate.high if known else None,
    }


def _interval(estimate: dict[str, float | None] | None, scale: float = 1.0) -> str:
    if estimate is None or estimate["value"] is None:
        return ABSENT
    value = f"{scale * estimate['value']:.2f}"
    if estimate["low"] is None or estimate["high"] is None:
        return value
    return f"{value} ({scale * estimate['low']:.2f}–{scale * estimate['high']:.2f})"


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.0%}"


# 97.5 % quantiles of Student's distribution, for 1, 2, … degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_STUDENT_FROM_11 = 2.201  # also used for more degrees of freedom; the interval is then a little too wide


def geometric_mean(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of positive values with its 95 % interval, which is (0, inf) for a single value."""
    logs = [math.log(value) for value in values]
    mean = fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(mean), 0.0, math.inf)
    quantile = _STUDENT[len(logs) - 2] if len(logs) - 2 < len(_STUDENT) else _STUDENT_FROM_11
    half = quantile * stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return the ratio `above` ÷ `below`. Both sequences have one positive value for each round."""
    return geometric_mean([a / b for a, b in zip(above, below, strict=True)])
