"""Estimates of a batch's time: how much work is left, and when it is done at which rates.

All is arithmetic on three kinds of number. The size of the input (gateway/jobs/batches/input/size.py) and the lengths
of finished lines say how many tokens are left, as a range. The heartbeats of workers say how many tokens a second the
batch tier gets at present, and how many it would get with the whole engine. The pace is what a batch has really got
lately. The module is pure; gateway/jobs/batches/forecast/forecasts.py collects the numbers.

The earliest end is the least work with the whole engine. A window is promised by more cautious numbers: work that is
rarely exceeded, after what is expected of batches that are due sooner, in the share of the engine that interactive
tiers have left in their busiest such time of the last hour. Urgent batches get this share.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from gateway.jobs.batches.forecast.line_deadlines import LineTimes
from gateway.jobs.batches.input.size import TOKEN_BYTES, InputSize
from gateway.jobs.batches.model import Batch
from scheduler.registry.worker_status import LEFT_STRETCHES_S, TierCapacity, WorkerStatus

KNOWN_LINES = 20  # finished lines after which a batch's own lengths and pace are believed
USUAL_OUTPUT_TOKENS = 256  # of a choice, while no line of this model and endpoint has finished
DEFAULT_CONTEXT = 4096  # tokens; while no worker is alive
# Uncertainty of a mean, as a factor up and down: of another batch's lengths, and of the bytes of a token.
OTHER_BATCH, OTHER_TEXT, UNKNOWN_TEXT = 2.0, 1.25, 2.0
OTHER_RATE = 1.5  # of the rates, while the batch has no pace, and once more while the workers have run no lines
MAX_LINES_PER_S = 500.0  # of one gateway, which runs a batch; as bench/facade.py has measured on two cores
LEAST_ERROR = 0.1  # relative error of the mean of many finished lines: those that are left may be others


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    expected: float
    high: float

    @classmethod
    def around(cls, expected: float, factor: float) -> "Range":
        return cls(expected / factor, expected, expected * factor)

    def cautious(self) -> float:
        """A value that is rarely exceeded, if errors are factors and `high` is hardly ever exceeded."""
        return math.sqrt(self.expected * self.high)

    def times(self, factor: float) -> "Range":
        return Range(self.low * factor, self.expected * factor, self.high * factor)

    def within(self, low: float, high: float) -> "Range":
        return Range(*(min(max(value, low), high) for value in (self.low, self.expected, self.high)))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sums over finished lines of one model and endpoint."""

    choices: float = 0.0
    prompt_bytes: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of a batch. Prompt tokens from the prefix cache are no work."""

    lines: int
    prompt_tokens: Range
    output_tokens: Range

    @property
    def output_tokens_per_line(self) -> float:
        return self.output_tokens.expected / self.lines if self.lines else 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of all workers: of the batch tier at present, and with the whole engine."""

    prompt_per_s: float
    output_per_s: float
    whole_prompt_per_s: float
    whole_output_per_s: float
    step_s: float  # time of a step: an output takes at least one for each token
    # Share of the whole rates that interactive tiers leave to urgent batches, in the busiest stretch of each of
    # LEFT_STRETCHES_S.
    left_shares: tuple[float, ...] = (1.0,) * len(LEFT_STRETCHES_S)
    is_measured: bool = True  # whether workers have computed lines, so that rates are no guess from a few steps

    def seconds(self, work: Work) -> Range:
        """Return the time of `work` at the present rates."""
        prompt, output = (
            work.prompt_tokens.times(1 / self.prompt_per_s),
            work.output_tokens.times(1 / self.output_per_s),
        )
        times_s = Range(prompt.low + output.low, prompt.expected + output.expected, prompt.high + output.high)
        return times_s.within(max(self.line_s(work), work.lines / MAX_LINES_PER_S), math.inf)

    def line_s(self, work: Work) -> float:
        """Return the time of one line by itself."""
        return work.output_tokens_per_line * self.step_s

    def whole_s(self, work: Work, amount: Callable[[Range], float]) -> float:
        """Return the time with the whole engine of the tokens that `amount` takes from the ranges of `work`."""
        prompt_s = amount(work.prompt_tokens) / self.whole_prompt_per_s
        return max(prompt_s + amount(work.output_tokens) / self.whole_output_per_s, work.lines / MAX_LINES_PER_S)

    def cautious_s(self, work: Work) -> float:
        """Return the time of work that is rarely exceeded, with the whole engine, at rates that may be a guess."""
        factor = 1.0 if self.is_measured else OTHER_RATE
        return max(factor * self.whole_s(work, Range.cautious), self.line_s(work))


@dataclass(frozen=True, slots=True)
class Pace:
    """What a batch got lately: rates, and the number of lines in which they were measured."""

    lines_per_s: float
    tokens_per_s: float  # of prompts and outputs together
    lines_seen: int

    @property
    def is_known(self) -> bool:
        return self.lines_seen >= KNOWN_LINES and self.lines_per_s > 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now. `basis` is "measured" (the batch's own pace) or "capacity" (what workers say they can do)."""

    finish_s: float
    earliest_s: float
    latest_s: float
    basis: str


def rates_of(workers: Iterable[WorkerStatus], tier: str) -> Rates | None:
    """Return the rates of all workers together; None if one of them does not know one of its own, or none is alive."""
    found = [(worker, status.capacity) for worker in workers if (status := worker.tiers.get(tier)) is not None]
    serving = [(worker, c) for worker, c in found if c is not None and _knows_its_rates(c)]
    known = [capacity for _, capacity in serving]
    if not known or len(known) < len(found):
        return None
    whole_output_per_s = sum(c.whole_output_tokens_per_s for c in known)
    shares = [(c.whole_output_tokens_per_s / whole_output_per_s, _left_shares(worker, c)) for worker, c in serving]
    return Rates(
        prompt_per_s=sum(c.prefill_tokens_per_s for c in known),
        output_per_s=sum(min(c.output_tokens_per_s, c.whole_output_tokens_per_s * _share_left(c)) for c in known),
        whole_prompt_per_s=sum(c.whole_prefill_tokens_per_s for c in known),
        whole_output_per_s=whole_output_per_s,
        step_s=max(c.step_s for c in known),
        left_shares=tuple(sum(part * left[i] for part, left in shares) for i in range(len(LEFT_STRETCHES_S))),
        is_measured=all(c.num_ended >= KNOWN_LINES for c in known),
    )


def _knows_its_rates(capacity: TierCapacity) -> bool:
    """Return whether a worker knows all its rates. Where it does not know one yet, that one is 0."""
    prompt = capacity.prefill_tokens_per_s, capacity.whole_prefill_tokens_per_s
    return min(*prompt, capacity.output_tokens_per_s, capacity.whole_output_tokens_per_s) > 0


def _share_left(capacity: TierCapacity) -> float:
    """Return the share of the engine that higher tiers leave to the tier."""
    return capacity.prefill_tokens_per_s / capacity.whole_prefill_tokens_per_s


def _left_shares(worker: WorkerStatus, capacity: TierCapacity) -> tuple[float, ...]:
    """Return the share for each of LEFT_STRETCHES_S; while the worker does not know them, the present share."""
    return worker.left_shares or (min(1.0, _share_left(capacity)),) * len(LEFT_STRETCHES_S)


def context_of(workers: Iterable[WorkerStatus]) -> int:
    """Return the most tokens that a sequence may have on each worker."""
    return min((worker.max_model_len for worker in workers), default=DEFAULT_CONTEXT)


def work_left(batch: Batch, lengths: Lengths, context: int) -> Work | None:
    """Return what is left of a batch; None if the size of its input is not known."""
    size = batch.size
    if size is None or not size.lines:
        return None
    lines = max(0, (batch.total or size.lines) - batch.completed - batch.failed)
    share = lines / size.lines
    prompt = _uncached(batch, size, prompt_tokens(batch, size, lengths))
    output = output_tokens(batch, size, lengths, context)
    return Work(lines, prompt.times(share), output.times(share))


def prompt_tokens(batch: Batch, size: InputSize, lengths: Lengths) -> Range:
    """Return the prompt tokens of all lines, by those that have ended: its own, or others."""
    if batch.completed >= KNOWN_LINES:
        return Range.around(size.lines * batch.input_tokens / batch.completed, 1 + _error(batch.completed))
    if lengths.prompt_bytes:
        return Range.around(size.prompt_bytes * lengths.prompt_tokens / lengths.prompt_bytes, OTHER_TEXT)
    return Range.around(size.prompt_bytes / TOKEN_BYTES, UNKNOWN_TEXT)


def output_tokens(batch: Batch, size: InputSize, lengths: Lengths, context: int) -> Range:
    """Return the output tokens of all lines, by those that have ended: its own, or others."""
    most = size.max_output + size.unlimited * context
    if batch.completed >= KNOWN_LINES:
        mean = size.lines * batch.output_tokens / batch.completed
        return Range.around(mean, 1 + _error(batch.completed)).within(0, most)
    if lengths.choices:
        usual = Range.around(size.choices * lengths.output_tokens / lengths.choices, OTHER_BATCH)
    else:
        usual = Range(size.choices, size.choices * USUAL_OUTPUT_TOKENS, most)
    return usual.within(size.min_output, most)


def _uncached(batch: Batch, size: InputSize, tokens: Range) -> Range:
    """Return the part of the prompts that is computed: at most all, at least what no other prompt begins with."""
    distinct = size.distinct_bytes / size.prompt_bytes if size.prompt_bytes else 1.0
    share = distinct
    if batch.completed >= KNOWN_LINES and batch.input_tokens:
        share = 1 - batch.cached_tokens / batch.input_tokens
    return Range(tokens.low * min(distinct, share), tokens.expected * share, tokens.high)


def _error(lines: int) -> float:
    """Return the relative error of a mean over finished lines, whose lengths vary by about their mean."""
    return max(LEAST_ERROR, 2 / math.sqrt(lines))


def estimate(work: Work, ahead: Sequence[Work], rates: Rates | None, pace: Pace | None) -> Estimate | None:
    """Return when `work` is done beside the batches `ahead`, which share the tier; None if nothing is known."""
    [finish_s, *_] = finish_times_s([work, *ahead], [pace, *(None for _ in ahead)], rates)
    if finish_s is None:
        return None
    earliest_s = 0.0 if rates is None else min(finish_s, rates.whole_s(work, attrgetter("low")))
    if pace is not None and pace.is_known:
        return Estimate(finish_s, earliest_s, finish_s * (1 + _error(pace.lines_seen)), "measured")
    assert rates is not None
    factor = OTHER_RATE if rates.is_measured else OTHER_RATE**2
    latest_s = factor * sum(rates.seconds(other).high for other in (work, *ahead))
    return Estimate(finish_s, earliest_s, latest_s, "capacity")


def finish_times_s(works: Sequence[Work], paces: Sequence[Pace | None], rates: Rates | None) -> list[float | None]:
    """Return when each of `works` is done, which are all that share the tier; None for what is not known.

    Batches run at the same time. A batch that has a pace goes on with it. Before another one ends, each other batch is
    expected to get as much work done as this one has, and at most all of its own. Takes n log n steps.
    """
    times_s = [0.0 if rates is None else rates.seconds(work).expected for work in works]
    ordered = sorted(times_s)
    sums = [0.0, *accumulate(ordered)]
    finish_s: list[float | None] = []
    for work, pace, own_s in zip(works, paces, times_s, strict=True):
        if pace is not None and pace.is_known:
            finish_s.append(work.lines / pace.lines_per_s)
        elif rates is None:
            finish_s.append(None)
        else:
            num_shorter = bisect_left(ordered, own_s)
            finish_s.append(sums[num_shorter] + own_s * (len(works) - num_shorter))
    return finish_s


def line_times(work: Work, sooner: Iterable[Work], rates: Rates) -> LineTimes:
    """Return how long the lines of a batch take at the present rates. `sooner` are the batches that are due sooner."""
    if not work.lines:
        return LineTimes()
    sooner_s = sum(rates.seconds(other).expected for other in sooner)
    return LineTimes(
        line_s=rates.seconds(work).expected / work.lines,
        own_s=rates.line_s(work),
        sooner_s=sooner_s,
        least_line_s=rates.whole_s(work, attrgetter("low")) / work.lines,
    )
