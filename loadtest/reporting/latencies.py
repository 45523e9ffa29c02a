"""The latencies that reports show: quantiles of TTFT, ITL and E2E, as cells of a table, and their ratios.

Every table of arms, classes and latencies makes its columns (or rows) with these, so that all of them have the same
names and rounding. Knows anything that has the three distributions; does not know what was compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.estimates import Distribution, Estimate, HasLatencies, ratio
from loadtest.reporting.formats import interval, milliseconds


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency. `of` is the name of the distribution: ttft, itl or e2e. `q` is a quantile; None: the longest."""

    of: str
    q: float | None

    @property
    def short(self) -> str:
        return "max" if self.q is None else f"p{100 * self.q:g}"

    @property
    def name(self) -> str:
        return f"{self.of.upper()} {self.short}"

    def distribution(self, summary: HasLatencies) -> Distribution:
        found: Distribution = getattr(summary, self.of)
        return found

    def cell(self, summary: HasLatencies) -> str:
        """Return the latency in ms; a dash without samples."""
        samples = self.distribution(summary)
        if self.q is None:
            return milliseconds(samples.max)
        estimate = samples.quantile(self.q)
        return milliseconds(None if estimate is None else estimate.value)

    def ratio(self, above: HasLatencies, below: HasLatencies) -> Estimate | None:
        assert self.q is not None, "a longest value has no interval"
        return ratio(self.distribution(above), self.distribution(below), self.q)

    def ratio_cell(self, above: HasLatencies, below: HasLatencies) -> str:
        return interval(self.ratio(above, below))


TTFT_P50, TTFT_P95, TTFT_P99 = (Latency("ttft", q) for q in (0.5, 0.95, 0.99))
ITL_P50, ITL_P99, ITL_MAX = (Latency("itl", q) for q in (0.5, 0.99, None))
E2E_P50, E2E_P99 = (Latency("e2e", q) for q in (0.5, 0.99))
ARM_LATENCIES = (TTFT_P50, TTFT_P95, TTFT_P99, ITL_P50, ITL_P99, ITL_MAX, E2E_P50)


def header_of(latencies: Sequence[Latency]) -> tuple[str, ...]:
    """Return the header of columns of latencies; of neighbours with the same distribution, only the first names it."""
    before = [None, *(latency.of for latency in latencies)]
    return tuple(
        latency.short if latency.of == last else latency.name for last, latency in zip(before, latencies, strict=False)
    )


def cells_of(latencies: Sequence[Latency], summary: HasLatencies) -> tuple[str, ...]:
    return tuple(latency.cell(summary) for latency in latencies)
