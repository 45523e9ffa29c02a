"""A small scheduler for tests: it runs sequences to their end, chunked and preempted by rules that a test gives."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.interface import (
    EngineInfo,
    FinishReason,
    GrammarError,
    NewSequence,
    Preempt,
    PreemptionMode,
    Run,
    SamplingParams,
    StepPlan,
    StepResult,
)


class Stepper(Protocol):
    """An engine that blocks while it steps."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def compile_grammar(self, grammar: str) -> object: ...


@dataclass
class Driven:
    """One sequence, as the driver knows it."""

    new: NewSequence
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0  # tokens taken from the prefix cache, over all starts
    preempted_by: PreemptionMode | None = None
    finish_reason: FinishReason | None = None
    failure: str | None = None

    @property
    def num_uncomputed(self) -> int:
        return len(self.new.prompt_token_ids) + len(self.output) - self.num_computed

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.failure is not None


Chunking = Callable[[Driven], int]  # tokens to run next
Drafting = Callable[[Driven], Iterable[int]]  # draft of a decode; what does not fit is cut off
Preemption = Callable[[Driven], PreemptionMode | None]  # whether and how to preempt in this step


def make_new(seq_id: str, prompt: Iterable[int], cache_salt: str = "", **sampling: object) -> NewSequence:
    params: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return NewSequence(seq_id, tuple(prompt), SamplingParams(**params), cache_salt)  # type: ignore[arg-type]


def drive(
    engine: Stepper,
    news: Iterable[NewSequence],
    chunk: Chunking = lambda s: s.num_uncomputed,
    preempt: Preemption = lambda s: None,
    arrivals_a_step: int | None = None,
    after_step: Callable[[StepResult], None] = lambda result: None,
    draft: Drafting = lambda s: (),
) -> dict[str, Driven]:
    """Run `news` to their end and return them by id. A preempted sequence is resumed in the next step."""
    waiting = list(news)
    driven: dict[str, Driven] = {}
    for step_id in range(10_000):
        live = [s for s in driven.values() if not s.is_over]
        if not waiting and not live:
            return driven
        arrived, waiting = waiting[:arrivals_a_step], waiting[len(waiting[:arrivals_a_step]) :]
        started = _compile_grammars(engine, arrived, driven)
        plan = _plan(engine.info, step_id, live, started, chunk, preempt, draft)
        driven.update({new.seq_id: _new(new) for new in started})
        _note_preemptions(driven, plan)
        result = engine.step(plan)
        _take_in(driven, result)
        after_step(result)
    raise AssertionError("the sequences do not end")


def _new(new: NewSequence) -> Driven:
    return Driven(new, list(new.output_token_ids))


def _compile_grammars(engine: Stepper, news: list[NewSequence], driven: dict[str, Driven]) -> list[NewSequence]:
    """Return the sequences that can be started. The others are added to `driven` as failed."""
    ready = []
    for new in news:
        try:
            ready.append(compiled(engine, new))
        except GrammarError as error:
            driven[new.seq_id] = Driven(new, failure=str(error))
    return ready


def compiled(engine: Stepper, new: NewSequence) -> NewSequence:
    """Return `new` with its grammar compiled. Raises `GrammarError` if it does not compile."""
    grammar = new.sampling.grammar
    return new if grammar is None else replace(new, compiled_grammar=engine.compile_grammar(grammar))


def _plan(
    info: EngineInfo,
    step_id: int,
    live: list[Driven],
    started: list[NewSequence],
    chunk: Chunking,
    preempt: Preemption,
    draft: Drafting,
) -> StepPlan:
    resumed = [s for s in live if s.preempted_by is not None]
    victims = {s.new.seq_id: mode for s in live if s.preempted_by is None and (mode := preempt(s))}
    runnable = [s for s in live if s.new.seq_id not in victims] + [_new(new) for new in started]
    budget, runs = info.max_step_tokens, []
    for s in runnable:
        recomputed = s.preempted_by is PreemptionMode.RECOMPUTE
        known = Driven(s.new, s.output, 0 if recomputed else s.num_computed)
        num_tokens = min(budget, known.num_uncomputed, max(1, chunk(known)))
        if num_tokens:
            runs.append(Run(s.new.seq_id, num_tokens, _draft(info, known, draft, budget - num_tokens)))
            budget -= num_tokens + len(runs[-1].draft)
    return StepPlan(
        step_id,
        preempt=tuple(Preempt(seq_id, mode) for seq_id, mode in victims.items()),
        resume=tuple(s.new.seq_id for s in resumed),
        start=tuple(started),
        run=tuple(runs),
    )


def _draft(info: EngineInfo, s: Driven, draft: Drafting, budget: int) -> tuple[int, ...]:
    sampling, num_prompt = s.new.sampling, len(s.new.prompt_token_ids)
    if not info.verifies_drafts or not s.num_computed or s.num_uncomputed != 1 or sampling.alters_logits:
        return ()
    left = min(info.max_model_len, num_prompt + sampling.max_tokens) - num_prompt - len(s.output)
    return tuple(draft(s))[: max(0, min(budget, left - 1))]


def _note_preemptions(driven: dict[str, Driven], plan: StepPlan) -> None:
    for seq_id in plan.resume:
        driven[seq_id].preempted_by = None
    for preempt in plan.preempt:
        driven[preempt.seq_id].preempted_by = preempt.mode
        if preempt.mode is PreemptionMode.RECOMPUTE:
            driven[preempt.seq_id].num_computed = 0


def _take_in(driven: dict[str, Driven], result: StepResult) -> None:
    for output in result.outputs:
        s = driven[output.seq_id]
        s.num_computed = output.num_computed_tokens
        s.num_cached += output.num_cached_tokens
        s.output += output.token_ids
        s.finish_reason = output.finish_reason
    for failure in result.failures:
        driven[failure.seq_id].failure = failure.reason


def random_preemption(rng: random.Random, probability: float, *modes: PreemptionMode) -> Preemption:
    """Preempt each sequence with `probability` in each step."""
    return lambda s: rng.choice(modes) if rng.random() < probability else None


def random_drafts(rng: random.Random, right: Mapping[str, Driven], longest: int) -> Drafting:
    """Draft the tokens that come next by `right`, and at a random place another one."""

    def draft(s: Driven) -> list[int]:
        tokens = right[s.new.seq_id].output[len(s.output) :][: rng.randint(0, longest)]
        if tokens and rng.random() < 0.5:
            tokens[rng.randrange(len(tokens))] = rng.randint(1, 90)
        return tokens + [rng.randint(1, 90) for _ in range(rng.randint(0, longest) - len(tokens))]

    return draft


def random_chunks(rng: random.Random, longest: int) -> Chunking:
    """Run 1 to `longest` tokens at a time."""
    return lambda s: rng.randint(1, longest)
