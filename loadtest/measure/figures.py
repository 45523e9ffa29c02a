"""The figures of a class in an arm: rates, latencies, lengths, and its errors by kind. All functions are pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.client.answer import Outcome
from loadtest.client.runner import UNFINISHED, ArmRun
from loadtest.estimates import ClassSummary, summarize
from loadtest.measure.rounds import Arm, Measurement

BIN_S = 1.0  # seconds; width of the bins in which tokens are counted


@dataclass(frozen=True, slots=True)
class Problem:
    """Errors of one kind. `example` is the whole text of one of them."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class ClassFigures:
    summary: ClassSummary
    is_streamed: bool
    requests_per_s: float  # complete answers that ended in the measured window
    mean_prompt_tokens: float | None  # as the server counts them; None without an answer that says so
    mean_output_tokens: float | None
    problems: tuple[Problem, ...]  # the most frequent first


Figures = Mapping[str, Mapping[str, ClassFigures]]  # arm → class → figures


def figures_of(measurement: Measurement) -> Figures:
    return {
        arm.name: {c.name: class_figures(measurement.runs[arm.name], c.name, c.stream) for c in arm.classes}
        for arm in measurement.measured
    }


def class_figures(runs: Sequence[ArmRun], name: str, is_streamed: bool) -> ClassFigures:
    """Return the figures of the class `name` over the runs of one arm; there is at least one run."""
    summary = summarize(runs, name, with_lead=True)
    complete = [o for run in runs for o in run.outcomes[name] if o.is_complete]
    in_window = sum(
        o.is_complete and o.finished_s is not None and run.start_s <= o.finished_s < run.end_s
        for run in runs
        for o in run.outcomes[name]
    )
    return ClassFigures(
        summary,
        is_streamed,
        in_window / sum(run.duration_s for run in runs),
        _mean([o.prompt_tokens for o in complete if o.prompt_tokens]),
        _mean([o.completion_tokens for o in complete if o.completion_tokens]),
        problems_of([o for run in runs for o in run.outcomes[name]]),
    )


def problems_of(outcomes: Sequence[Outcome]) -> tuple[Problem, ...]:
    """Return the errors of requests by kind, the most frequent first. An answer that the end cut off is no error."""
    failed = [o for o in outcomes if o.error not in (None, UNFINISHED)]
    examples = {kind_of(o): str(o.error) for o in failed}
    return tuple(Problem(kind, n, examples[kind]) for kind, n in Counter(map(kind_of, failed)).most_common())


def kind_of(outcome: Outcome) -> str:
    """Return the kind of an error: HTTP status and code, or the beginning of the sentence; requests' ids come later."""
    error = str(outcome.error)
    kind = error.partition(": ")[0]
    if outcome.status in (0, 200):
        return kind
    return f"HTTP {outcome.status}" if kind == str(outcome.status) or " " in kind else f"HTTP {outcome.status} {kind}"


def token_rate(run: ArmRun, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of bins of `BIN_S` from the start of a run, and the tokens a second of a class in each bin.

    Edges are in seconds on the client's clock; there is one more than there are bins. The last bin ends with the run.
    """
    edges = np.append(np.arange(run.start_s, run.end_s, BIN_S), run.end_s)
    times, counts = [], []
    for outcome in run.outcomes[name]:
        had = 0
        for at_s, has in outcome.progress:
            times.append(at_s)
            counts.append(has - had)
            had = has
    tokens, _ = np.histogram(times, bins=edges, weights=counts)
    return edges, tokens / np.diff(edges)


def ends_late(arm: Arm, figures: Mapping[str, ClassFigures]) -> list[str]:
    """Return a warning for each class with requests that had no end, since its latencies are then lower bounds."""
    return [
        f"{arm.name}, {name}: {f.summary.unfinished} of {f.summary.offered} requests had no end; their times count as "
        "what they had waited by then"
        for name, f in figures.items()
        if f.summary.unfinished
    ]


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
