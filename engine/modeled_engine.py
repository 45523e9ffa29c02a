"""An engine that computes nothing: steps take modeled time, tokens are a hash of (seed, position).

It keeps its books in the real one's table (sequences, blocks, finish reasons, and where wanted the prefix cache), so it
refuses the same bad plans: the scheduler's loop can be run, tested and simulated without torch, on whatever clock it is
given. Its coefficients and noise are its own; the controller must learn them, it is never told.
"""

import random
from collections import deque
from collections.abc import Awaitable, Callable

from engine.interface import EngineInfo, PlanError, SequenceOutput, StepPlan, StepResult
from engine.latency_model import StepCost
from engine.sequence_table import Chunk, SequenceTable

FIRST_ORDINARY_TOKEN = 3  # ids below are never generated; a real model's special ids


def modeled_token(seed: int, index: int, vocab_size: int) -> int:
    """The `index`-th output token of a sequence with `seed`: the same on any engine, after any preemption."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return FIRST_ORDINARY_TOKEN + mixed % (vocab_size - FIRST_ORDINARY_TOKEN)


class ModeledEngine:
    """Implements `Engine`. `sleep` is the clock's: virtual in the simulator, real in a test of the real loop. Traces
    name lengths, not texts, and texts made up for them would be found in a prefix cache: it is off unless asked for.
    """

    def __init__(
        self,
        info: EngineInfo,
        sleep: Callable[[float], Awaitable[None]],
        cost: StepCost | None = None,
        noise: float = 0.05,
        seed: int = 0,
        *,
        prefix_cache: bool = False,
    ) -> None:
        self._info = info
        self._sleep = sleep
        self._cost = cost or StepCost()
        self._noise = noise
        self._random = random.Random(seed)
        self._prefix_cache = prefix_cache
        self._table = SequenceTable(info, prefix_cache=prefix_cache)
        self._submitted: deque[StepPlan] = deque()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def used_blocks(self) -> int:
        return self._table.pool.num_used

    @property
    def used_swap_blocks(self) -> int:
        return self._table.swap_pool.num_used

    def submit(self, plan: StepPlan) -> None:
        """Raises `PlanError` for a plan that breaks the rules."""
        if self._submitted:
            raise PlanError("one step in flight, not more")
        self._table.check(plan)
        self._submitted.append(plan)

    async def collect(self) -> StepResult:
        plan = self._submitted[0]
        chunks = self._table.begin(plan)
        elapsed_s = self._duration(chunks)
        await self._sleep(elapsed_s)
        outputs = tuple(self._advance(chunk) for chunk in chunks)
        self._submitted.popleft()
        return StepResult(
            plan.step_id,
            outputs,
            free_blocks=self._table.pool.num_free,
            elapsed_s=elapsed_s,
            free_swap_blocks=self._table.swap_pool.num_free,
            shared_blocks=self._table.pool.take_changes(),
        )

    def close(self) -> None:
        self._table = SequenceTable(self._info, prefix_cache=self._prefix_cache)

    def _duration(self, chunks: list[Chunk]) -> float:
        seconds = len(self._table.copies) * self._info.swap_block_s
        if not chunks:
            return seconds
        seconds += self._cost.step_s + sum(self._cost.run(c.num_tokens, c.start) for c in chunks)
        return seconds * max(0.1, self._random.gauss(1.0, self._noise))

    def _advance(self, chunk: Chunk) -> SequenceOutput:
        sequence = chunk.sequence
        if not chunk.samples:
            self._table.advance(chunk, None)
            return SequenceOutput(sequence.seq_id, chunk.end, num_cached_tokens=chunk.num_cached)
        token = modeled_token(sequence.sampling.seed, sequence.num_output_tokens, self._info.vocab_size)
        reason = self._table.advance(chunk, token)
        return SequenceOutput(sequence.seq_id, chunk.end, (token,), reason, chunk.num_cached)
