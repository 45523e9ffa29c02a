"""The result of a soak, and whether the soak passed. Pure."""

from dataclasses import asdict, dataclass
from statistics import fmean

from loadtest.reporting.record import Record, Section

MAX_GROWTH = 0.02  # largest allowed growth of the mean RSS from the first half of the run to the second


@dataclass(frozen=True, slots=True)
class SoakResult:
    seconds: float
    steps: int
    tokens: int
    finished: int
    aborted: int
    preemptions: dict[str, int]
    rss_bytes: tuple[int, ...]  # RSS at regular intervals, without the start of the run
    blocks_lost: int  # KV blocks that were not free at the end

    @property
    def growth(self) -> float:
        """Growth of the RSS: its mean in the second half ÷ its mean in the first half − 1."""
        return rss_growth(self.rss_bytes)

    def record(self) -> Record:
        first, last = (self.rss_bytes[i] / 2**20 if self.rss_bytes else 0.0 for i in (0, -1))
        verdict = "flat" if self.growth <= MAX_GROWTH else f"GREW, by more than {MAX_GROWTH:.0%}"
        preemptions = ", ".join(f"{count} by {mode}" for mode, count in self.preemptions.items())
        notes = (
            f"{self.steps} steps and {self.tokens} tokens in {self.seconds:.0f} s: {self.finished} finished, "
            f"{self.aborted} aborted; preempted: {preemptions}",
            f"RSS {first:.1f} MiB first, {last:.1f} MiB last, second half {self.growth:+.2%}: {verdict}",
            "all KV blocks came back" if not self.blocks_lost else f"LOST: {self.blocks_lost} KV blocks",
        )
        data = asdict(self) | {"growth": self.growth, "passed": self.passed}
        return Record(sections=[Section(notes=notes)], data=data)

    @property
    def passed(self) -> bool:
        return self.growth <= MAX_GROWTH and self.blocks_lost == 0 and self.finished > 0


def rss_growth(samples: tuple[int, ...]) -> float:
    middle = len(samples) // 2
    return fmean(samples[middle:]) / fmean(samples[:middle]) - 1.0 if middle else 0.0
