"""A few synthetic steps at start: they warm the engine up and give the step-time model its first data.

Uses nothing but the engine's own interface, and leaves nothing behind.
"""

from collections.abc import Iterator
from contextlib import suppress

from engine.interface import Engine, EngineInfo, NewSequence, Run, SamplingParams, StepPlan
from engine.latency_model import StepTimeModel, StepWork
from scheduler.clock import Clock

PROMPTS = (48, 16, 96, 32, 64, 24, 16, 80)  # tokens; different, so that the coefficients can be told apart
DECODES = 6  # steps after each new sequence


async def warm_up(engine: Engine, model: StepTimeModel, clock: Clock, budget_s: float = 1.0) -> None:
    """Run prefills and growing decode batches, teaching `model`, for about `budget_s` at most."""
    until_s = clock.now() + budget_s
    started: dict[str, int] = {}  # sequence → tokens computed
    room = engine.info.num_blocks * engine.info.block_size // 2
    steps = _steps(engine.info, room)
    step_id = -1
    with suppress(StopIteration):
        while clock.now() < until_s:
            length = next(steps)
            plan = _plan(step_id, started, length)
            work = StepWork()
            for run in plan.run:
                work.add(run.num_tokens, started.get(run.seq_id, 0))
                started[run.seq_id] = started.get(run.seq_id, 0) + run.num_tokens
            engine.submit(plan)
            result = await engine.collect()
            if step_id < -1:  # the first step also pays for lazy initialisation
                model.observe(work, result.elapsed_s)
            step_id -= 1
    engine.submit(StepPlan(step_id, abort=tuple(started)))
    await engine.collect()


def _steps(info: EngineInfo, room: int) -> Iterator[int]:
    """Prompt length of the sequence to start in each step; 0: decode what runs."""
    for prompt in PROMPTS:
        length = prompt + DECODES * len(PROMPTS)
        if length >= info.max_model_len or length > room:
            return
        room -= length
        yield min(prompt, info.max_step_tokens)
        yield from [0] * DECODES


def _plan(step_id: int, started: dict[str, int], length: int) -> StepPlan:
    if length == 0:
        return StepPlan(step_id, run=tuple(Run(seq_id, 1) for seq_id in started))
    sampling = SamplingParams(max_tokens=1 << 30, temperature=0.0, ignore_eos=True)
    seq_id = f"warm-up-{len(started)}"
    new = NewSequence(seq_id, tuple([1] * length), sampling, cache_salt=seq_id)  # nothing is spared its prefill
    return StepPlan(step_id, start=(new,), run=(Run(new.seq_id, length),))
