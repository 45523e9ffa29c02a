"""Executes plans with an encoder: a step computes whole texts, and one token of each stands for its vector.

Keeps the books with `engine.sequences`, as the other engines do, though nothing outlasts a step. Knows plans and
sequences; does not know models.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from engine.interface import EngineInfo, GrammarError, PlanError, SequenceFailure, SequenceOutput, StepPlan, StepResult
from engine.sequences.chunk import Chunk, Outcome, output_of
from engine.sequences.sequence_table import SequenceTable
from engine.suspension import Suspender

STANDS_FOR_VECTOR = 0  # the token id


class Text(NamedTuple):
    """One text, or a pair whose second text begins at `second_from` (0: it is no pair)."""

    token_ids: Sequence[int]
    second_from: int = 0


class Encodes(Protocol):
    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        """Return a vector of each text, in order, as float32 in little-endian order."""
        ...


class EmbeddingStepper:
    """An engine over an encoder. Implements `engine.thread.Stepper`."""

    def __init__(self, info: EngineInfo, encoder: Encodes) -> None:
        self.info = info
        self._encoder = encoder
        self._table = SequenceTable(info)
        self._result: StepResult | None = None

    def launch(self, plan: StepPlan) -> None:
        """Compute a step. Raises `PlanError` before anything changes."""
        begun_s = perf_counter()
        self._table.check(plan)
        chunks = self._table.begin(plan)
        if not all(chunk.samples for chunk in chunks):
            raise PlanError("an encoder computes each text as a whole")
        whole = [chunk for chunk in chunks if not chunk.start]
        texts = [Text(chunk.sequence.token_ids, chunk.sequence.second_from) for chunk in whole]
        vectors = iter(self._encoder.encode(texts))
        found = [self._end(chunk, None if chunk.start else next(vectors)) for chunk in chunks]
        self._result = StepResult(
            plan.step_id,
            tuple(output for output in found if isinstance(output, SequenceOutput)),
            tuple(failure for failure in found if isinstance(failure, SequenceFailure)),
            free_blocks=self._table.pool.num_free,
            elapsed_s=perf_counter() - begun_s,
        )

    def _end(self, chunk: Chunk, vector: bytes | None) -> SequenceOutput | SequenceFailure:
        """Return the end of a text. What goes on behind its vector is of a gateway that takes the model for a chat."""
        seq_id = chunk.sequence.seq_id
        if vector is None:
            self._table.free(seq_id)
            return SequenceFailure(seq_id, "the model makes vectors and generates no text")
        if not np.isfinite(np.frombuffer(vector, "<f4")).all():
            self._table.free(seq_id)
            return SequenceFailure(seq_id, "the model computed numbers that are not finite")
        outcome = Outcome((STANDS_FOR_VECTOR,), vector=vector)
        return output_of(chunk, outcome, self._table.advance(chunk, outcome.token_ids))

    @property
    def is_finished(self) -> bool:
        return self._result is not None

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """Do nothing: a step has ended when `launch` returns."""

    def finalize(self) -> StepResult:
        assert self._result is not None, "no step was launched"
        result, self._result = self._result, None
        return result

    def compile_grammar(self, grammar: str) -> object:
        raise GrammarError("The model generates no text.")

    def check_alive(self) -> None:
        """Do nothing: the encoder has no process of its own."""

    def suspend_by(self, suspender: Suspender) -> None:
        """Do nothing: a step ends as a whole."""

    def close(self) -> None:
        """Do nothing: the encoder's memory goes with it."""
