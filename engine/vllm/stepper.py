"""Executes plans with vLLM's executor, in order.

Keeps the books (sequences, blocks, prefix cache) with `engine.sequences`, as the native engine does. A step is started
and finalized later, so that the next step can be planned while vLLM computes. Knows plans, sequences and grammars; does
not know vLLM's messages or processes (`BatchExecutor`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

from engine.grammar import CompiledGrammar
from engine.interface import EngineInfo, PreemptionMode, SequenceFailure, SequenceOutput, StepPlan, StepResult
from engine.sequences.chunk import Chunk, Outcome
from engine.sequences.sequence_table import SequenceTable
from engine.suspension import Suspender
from engine.vllm.batch import Batch, BatchExecutor
from engine.vllm.constraints import Constraints

_PLACEHOLDER = -1  # stands in a sequence for a token that is not known yet


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that is not finalized yet."""

    step_id: int
    chunks: list[Chunk]
    batches: "list[Future[dict[str, Outcome]]]"
    failures: list[SequenceFailure]  # known before the step began
    started_s: float


@dataclass(slots=True)
class _Changes:
    """What the next batch must tell the executor about sequences."""

    lost: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


class VllmStepper:
    """An engine over vLLM's executor. Implements `Stepper`."""

    def __init__(
        self, info: EngineInfo, executor: BatchExecutor, constraints: Constraints, *, prefix_cache: bool
    ) -> None:
        self.info = info
        self._executor = executor
        self._constraints = constraints
        self._table = SequenceTable(info, prefix_cache=prefix_cache)
        self._changes = _Changes()
        self._started: deque[StartedStep] = deque()  # oldest first
        self._results: deque[StepResult] = deque()  # of finalized steps, oldest first
        self._finalized_s = 0.0
        self._on_computed: Callable[[], None] = lambda: None

    def compile_grammar(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar, on any thread. Raises `GrammarError` if it does not compile."""
        return self._constraints.grammars.compile(grammar)

    def check_alive(self) -> None:
        """Raise `ExecutorDied` if vLLM's executor has ended."""
        self._executor.check_alive()

    def step(self, plan: StepPlan) -> StepResult:
        """Execute a plan to its end and return the result.

        Raises `PlanError` before anything changes. After any other error, the engine must not be used any more.
        """
        self.launch(plan)
        return self.finalize()

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises the same errors as `step`."""
        started_s = perf_counter()
        if plan.ahead:
            plan = self._table.without_ended(plan)
        else:
            self._finalize_all()
        self._table.check(plan)
        self._note_changes(plan)
        chunks = self._table.begin(plan)
        if any(self._constraints.needs_tokens(chunk) for chunk in chunks):
            self._finalize_all()
            chunks = [chunk for chunk in chunks if self._table.holds(chunk.sequence)]
        self._start(plan.step_id, chunks, started_s)

    @property
    def is_finished(self) -> bool:
        """True if `finalize` would return without waiting."""
        return bool(self._results) or (bool(self._started) and all(b.done() for b in self._started[0].batches))

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """From now on, call `callback` whenever a batch has been computed, on the thread that waited for it."""
        self._on_computed = callback

    def finalize(self) -> StepResult:
        """Wait for the oldest step and return its result."""
        if not self._results:
            self._finalize_oldest()
        return self._results.popleft()

    def suspend_by(self, suspender: Suspender) -> None:
        """Do nothing: vLLM computes a step to its end."""

    def close(self) -> None:
        """End vLLM's workers."""
        self._executor.close()

    # -- start a step ------------------------------------------------------------------------------------------------

    def _note_changes(self, plan: StepPlan) -> None:
        self._changes.ended.update(plan.abort)
        self._changes.lost.difference_update(plan.abort)
        self._changes.lost.update(p.seq_id for p in plan.preempt if p.mode is PreemptionMode.RECOMPUTE)

    def _start(self, step_id: int, chunks: list[Chunk], started_s: float) -> None:
        masks, failed = self._constraints.masks(chunks)
        for seq_id in failed:
            self._table.free_broken(seq_id)
        self._changes.ended.update(failed)
        chunks = [chunk for chunk in chunks if chunk.sequence.seq_id not in failed]
        batches = []
        for piece in _pieces(chunks, self._executor.max_num_seqs):
            changes, self._changes = self._changes, _Changes()
            own = {c.sequence.seq_id: masks[c.sequence.seq_id] for c in piece if c.sequence.seq_id in masks}
            batch = Batch(piece, own, frozenset(changes.lost), frozenset(changes.ended))
            batches.append(self._executor.start(batch))
            batches[-1].add_done_callback(lambda _: self._on_computed())
        for chunk in chunks:
            self._table.launch(chunk, _PLACEHOLDER if chunk.samples else None)
        failures = [SequenceFailure(seq_id, reason) for seq_id, reason in failed.items()]
        self._started.append(StartedStep(step_id, chunks, batches, failures, started_s))

    # -- finalize a step ---------------------------------------------------------------------------------------------

    def _finalize_all(self) -> None:
        while self._started:
            self._finalize_oldest()

    def _finalize_oldest(self) -> None:
        """Wait for the oldest step and record its tokens."""
        step = self._started.popleft()
        outcomes: dict[str, Outcome] = {}
        for batch in step.batches:
            outcomes |= batch.result()
        outputs, failures = self._table.finalize_all(step.chunks, outcomes)
        self._changes.ended.update(output.seq_id for output in outputs if output.finish_reason is not None)
        self._changes.ended.update(failure.seq_id for failure in failures)
        self._report(step, outputs, [*step.failures, *failures])

    def _report(self, step: StartedStep, outputs: list[SequenceOutput], failures: list[SequenceFailure]) -> None:
        now_s = perf_counter()
        busy_s = now_s - max(step.started_s, self._finalized_s)  # vLLM computes the previous step first
        self._finalized_s = now_s
        self._results.append(
            StepResult(
                step_id=step.step_id,
                outputs=tuple(outputs),
                failures=tuple(failures),
                free_blocks=self._table.pool.num_free,
                elapsed_s=busy_s,
                shared_blocks=self._table.pool.take_changes(),
            )
        )


def _pieces(chunks: Iterable[Chunk], size: int) -> Iterator[tuple[Chunk, ...]]:
    """Return the chunks in groups of at most `size`."""
    rest = iter(chunks)
    while piece := tuple(islice(rest, size)):
        yield piece
