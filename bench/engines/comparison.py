"""The interleaved run: every system gets every job, in several rounds.

For each job, the systems run one after another, in random order. If a system fails, it is removed from the run and the
reason of the failure is recorded; the run continues with the other systems. Knows jobs, clients and what is recorded of
each job; does not know how systems work or how results are shown.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from bench.engines.systems.client import SystemClient, SystemUnavailable
from bench.engines.work import QUICK_SHAPES, SHAPES, STEP_TOKENS, Job, WorkKind, WorkShape, make_job, make_step_jobs

SERIAL_SYSTEMS = frozenset({"generate"})  # systems that serve one request at a time
WARM_UP_TOKENS = 8  # new tokens of each warm-up request


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run: kinds of work, numbers of streams, and rounds.

    A system that serves one request at a time gets only `serial_requests` requests of each job, since its rate does not
    depend on the number of waiting requests. Which requests of a job it gets changes from round to round.
    """

    works: tuple[WorkKind, ...]
    streams: tuple[int, ...]
    rounds: int
    seed: int
    vocab_size: int
    is_quick: bool = False
    serial_requests: int = 2

    def shape(self, work: WorkKind) -> WorkShape:
        return (QUICK_SHAPES if self.is_quick else SHAPES)[work]


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurement of one job on one system.

    `tokens` counts new tokens. For prefill work, it counts prompt tokens too.
    """

    system: str
    work: WorkKind
    streams: int
    round: int
    job: Job  # only the requests that the system was given
    elapsed_s: float

    @property
    def tokens(self) -> int:
        prompts = self.job.num_prompt_tokens if self.work is WorkKind.PREFILL else 0
        return prompts + self.job.num_new_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s


@dataclass(frozen=True, slots=True)
class StepSample:
    """The mean time of a decode step with `streams` sequences, on one system in one round."""

    system: str
    streams: int
    round: int
    seconds: float


@dataclass(slots=True)
class Comparison:
    """The measurements of a run. Written by `compare` only."""

    systems: tuple[str, ...]
    samples: list[Sample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    same_tokens: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    compared_tokens: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    unavailable: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    idle_cpu_shares: dict[str, float | None] = field(default_factory=dict)

    def agreement(self, one: str, other: str) -> float | None:
        """Return the share of greedy tokens that two systems generate alike, before their answers first differ.

        None if no answers of the two systems were compared.
        """
        pair = (one, other) if (one, other) in self.compared_tokens else (other, one)
        total = self.compared_tokens.get(pair, 0)
        return self.same_tokens[pair] / total if total else None


def compare(
    plan: Plan,
    clients: Sequence[SystemClient],
    report_progress: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Run `plan`, or its beginning until `is_over`, and return its measurements.

    Starts the clients; the caller ends them.
    """
    run = _Run(plan, clients, report_progress)
    run.begin()
    for round_ in range(plan.rounds):
        for streams in plan.streams:
            for work in (*plan.works, None):
                if is_over():
                    return run.end()
                if work is None:
                    run.measure_step(streams, round_)
                else:
                    run.measure_job(work, streams, round_)
    return run.end()


class _Run:
    """The state of a run: the systems that have not failed, and the measurements so far."""

    def __init__(self, plan: Plan, clients: Sequence[SystemClient], report_progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._all = clients
        self._present = list(clients)
        self._order = random.Random(plan.seed)
        self._report_progress = report_progress
        self._noted = Comparison(tuple(c.name for c in clients))

    def begin(self) -> None:
        self._report_progress(f"loading {', '.join(c.name for c in self._all)}")
        self._each(lambda client: client.start())
        self._noted.settings = {c.name: c.settings for c in self._present}
        self._report_progress("warming up")
        self._each(self._warm_up)

    def end(self) -> Comparison:
        self._noted.idle_cpu_shares = {c.name: c.idle_cpu_share for c in self._all}
        return self._noted

    def measure_job(self, work: WorkKind, streams: int, round_: int) -> None:
        plan = self._plan
        self._report_progress(f"round {round_ + 1} of {plan.rounds}: {work}, {streams} streams")
        job = make_job(plan.shape(work), streams, plan.vocab_size, plan.seed, work, streams, round_)
        answers: dict[str, dict[int, list[int]]] = {}

        def measure(client: SystemClient) -> None:
            is_serial = client.name in SERIAL_SYSTEMS
            mine = job.ring(round_, plan.serial_requests if is_serial else streams)
            part = job.pick(mine)
            done = client.run(part)
            self._noted.samples.append(Sample(client.name, work, streams, round_, part, done.elapsed_s))
            answers[client.name] = dict(zip(mine, done.tokens, strict=True))

        self._each(measure)
        self._note_agreement(answers)

    def measure_step(self, streams: int, round_: int) -> None:
        plan = self._plan
        short, long = make_step_jobs(streams, plan.vocab_size, plan.seed, round_)

        def measure(client: SystemClient) -> None:
            if streams > 1 and client.name in SERIAL_SYSTEMS:
                return
            elapsed_s = client.run(long).elapsed_s - client.run(short).elapsed_s
            self._noted.steps.append(StepSample(client.name, streams, round_, elapsed_s / STEP_TOKENS))

        self._each(measure)

    def _each(self, work: Callable[[SystemClient], None]) -> None:
        """Call `work` for each system, in random order.

        A system that fails is ended at once, so that it takes no more memory or CPU time.
        """
        for client in self._order.sample(self._present, len(self._present)):
            try:
                work(client)
            except SystemUnavailable as error:
                self._noted.unavailable[client.name] = str(error)
                self._present.remove(client)
                client.end()

    def _warm_up(self, client: SystemClient) -> None:
        """Run the longest prompt, and a few steps with each number of streams.

        After this, no compilation and no first allocation falls into a measurement.
        """
        plan = self._plan
        longest = max(plan.shape(work).prompt[1] for work in plan.works)
        shapes = [(WorkShape((longest, longest), (2, 2)), 1)]
        if client.name not in SERIAL_SYSTEMS:
            shapes += [(WorkShape((16, 32), (WARM_UP_TOKENS,) * 2), streams) for streams in plan.streams]
        for i, (shape, streams) in enumerate(shapes):
            client.run(make_job(shape, streams, plan.vocab_size, plan.seed, "warm-up", i))

    def _note_agreement(self, answers: dict[str, dict[int, list[int]]]) -> None:
        names = [name for name in self._noted.systems if name in answers]
        for one, other in combinations(names, 2):
            for i in answers[one].keys() & answers[other].keys():
                mine, theirs = answers[one][i], answers[other][i]
                self._noted.same_tokens[one, other] += common_prefix(mine, theirs)
                self._noted.compared_tokens[one, other] += len(mine)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens before the first difference of two answers."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
