"""A few synthetic steps at start. They warm up the engine and give the step-time model its first data.

The steps hold only decodes, only prefills, or both; they have few or many sequences and, if time allows, a long
context. The module uses only the engine's interface, and leaves no sequences in the engine.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.interface import Engine, EngineInfo, NewSequence, Run, SamplingParams, StepPlan, blocks_for
from engine.step_time.cost import StepWork
from scheduler.clock import Clock

PROMPTS = (48, 16, 96, 32, 64, 24, 16, 80)  # tokens; the lengths differ, so that a fit can separate the coefficients
MAX_DECODES = 64  # maximum number of tokens by which a sequence grows, if it goes on after its prompt
LARGE_BATCH = 24  # number of further sequences, which start in one step
LARGE_BATCH_PROMPT = 4  # tokens in the prompt of each of these sequences
LONG_PROMPT = 1024  # tokens
LONG_CHUNK = 128  # tokens
LONG_DECODES = 4  # steps
PLAIN_SAMPLING = SamplingParams(max_tokens=1 << 30, temperature=0.0, ignore_eos=True)


async def warm_up(
    engine: Engine, observe: Callable[[StepWork, float], None], clock: Clock, budget_s: float = 1.0
) -> None:
    """Run prefills and growing decode batches for at most about `budget_s` seconds.

    For each step except the first, `observe` is called with the step's work and its time in seconds.
    """
    until_s = clock.now() + budget_s
    steps = _WarmUpSteps(engine.info)
    for plan in steps.plans():
        if clock.now() >= until_s:
            break
        work = steps.enter(plan)
        engine.submit(plan)
        result = await engine.collect()
        if plan.step_id < -1:  # the first step (-1) also pays for lazy initialisation
            observe(work, result.elapsed_s)
    engine.submit(steps.end())
    await engine.collect()


class _WarmUpSteps:
    """Makes the plans, sorted from the most to the least informative, and tracks the lengths of their sequences."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._blocks_left = info.num_blocks // 2
        self._lengths: dict[str, int] = {}  # number of computed tokens, by sequence id
        self._step_id = 0
        self._decodes = not info.whole_prompts  # whether sequences go on after the step of their prompt

    def plans(self) -> Iterator[StepPlan]:
        for number, prompt in enumerate(PROMPTS):
            # Every second prefill runs in one step with decodes of all earlier sequences.
            beside = list(self._lengths) if number % 2 and self._decodes else []
            if not self._fits(prompt) or len(beside) + 2 > self._info.max_step_tokens:
                return
            new = self._new(min(prompt, self._info.max_step_tokens - len(beside)))
            yield self._plan(beside, new, len(new.prompt_token_ids))
            if not self._decodes:
                continue
            running = list(self._lengths)
            yield self._plan(running)
            yield self._plan(running[: 1 + number // 2])
        yield from self._large_batch()
        yield from self._long_context()

    def _large_batch(self) -> Iterator[StepPlan]:
        prompt = LARGE_BATCH_PROMPT
        batch = [self._new(prompt, number) for number in range(LARGE_BATCH) if self._fits(prompt)]
        if not batch or len(batch) * prompt > self._info.max_step_tokens:
            return
        self._step_id -= 1
        run = tuple(Run(new.seq_id, prompt) for new in batch)
        yield StepPlan(self._step_id, start=tuple(batch), run=run)
        if not self._decodes:
            return
        running = list(self._lengths)
        for count in (len(running), len(running) // 2, len(running) * 3 // 4):
            yield self._plan(running[:count])

    def _long_context(self) -> Iterator[StepPlan]:
        if not (self._decodes and self._fits(LONG_PROMPT)):
            return
        new, running = self._new(LONG_PROMPT), list(self._lengths)
        chunk = min(LONG_CHUNK, self._info.max_step_tokens - len(running))
        yield self._plan([], new, chunk)
        while (left := LONG_PROMPT - self._lengths[new.seq_id]) > 0:
            is_last = left <= chunk
            yield self._plan(running if is_last else [], new, min(chunk, left), start=False)
        for number in range(LONG_DECODES):
            yield self._plan([new.seq_id] if number % 2 else [new.seq_id, *running])

    def enter(self, plan: StepPlan) -> StepWork:
        """Return the work of the plan that is submitted next, and record this work as done."""
        work = StepWork()
        for run in plan.run:
            computed = self._lengths.get(run.seq_id, 0)
            work.add(run.num_tokens, computed)
            self._lengths[run.seq_id] = computed + run.num_tokens
        return work

    def end(self) -> StepPlan:
        self._step_id -= 1
        return StepPlan(self._step_id, abort=tuple(self._lengths))

    def _fits(self, prompt: int) -> bool:
        length = prompt + (MAX_DECODES if self._decodes else 0)
        blocks = blocks_for(length, self._info.block_size)
        if length >= self._info.max_model_len or blocks > self._blocks_left:
            return False
        self._blocks_left -= blocks
        return True

    def _new(self, length: int, number: int = 0) -> NewSequence:
        seq_id = f"warm-up-{len(self._lengths) + number}"
        # Each sequence has its own salt, so that it finds nothing in a prefix cache and its prefill is computed.
        return NewSequence(seq_id, (1,) * length, PLAIN_SAMPLING, cache_salt=seq_id)

    def _plan(
        self, decodes: Sequence[str], chunk_of: NewSequence | None = None, chunk: int = 0, *, start: bool = True
    ) -> StepPlan:
        self._step_id -= 1
        run = tuple(Run(seq_id, 1) for seq_id in decodes)
        if chunk_of is None:
            return StepPlan(self._step_id, run=run)
        run = (*run, Run(chunk_of.seq_id, chunk))
        return StepPlan(self._step_id, start=(chunk_of,) if start else (), run=run)
