"""Offline generation: runs prompts through an engine to their end, without tiers, a queue or a clock.

Measures the speed of the engine itself. Every running sequence decodes in every step, and prompts fill the rest of the
step's token budget in order of arrival. Knows the engine's interface only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.interface import NewSequence, Run, StepPlan, StepResult
from loadtest.calibration.sweep import Stepper, greedy


class GenerationFailed(Exception):
    """Raised if a sequence fails or ends too early."""


@dataclass(slots=True)
class _Progress:
    new: NewSequence
    num_computed: int = 0
    is_started: bool = False
    output: list[int] = field(default_factory=list)

    @property
    def num_uncomputed(self) -> int:
        return len(self.new.prompt_token_ids) + len(self.output) - self.num_computed

    @property
    def is_over(self) -> bool:
        return len(self.output) >= self.new.sampling.max_tokens


def generate_offline(
    engine: Stepper,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
) -> list[list[int]]:
    """Return exactly `new_tokens[i]` greedy tokens for each prompt. Raises `GenerationFailed`."""
    sequences = [
        _Progress(NewSequence(f"offline-{i}", tuple(prompt), greedy(count)))
        for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    by_id = {p.new.seq_id: p for p in sequences}
    live, step_id = sequences, 0
    while live:
        plan = _plan(step_id, live, engine.info.max_step_tokens)
        result = engine.step(plan)
        _apply_result(by_id, result)
        live = [p for p in live if not p.is_over]
        step_id += 1
    return [p.output for p in sequences]


def _plan(step_id: int, live: Sequence[_Progress], budget: int) -> StepPlan:
    start: list[NewSequence] = []
    run: list[Run] = []
    for progress in sorted(live, key=lambda p: p.num_uncomputed > 1):  # decodes first; sorted() is stable
        count = min(progress.num_uncomputed, budget)
        if count < 1:
            break
        if not progress.is_started:
            progress.is_started = True
            start.append(progress.new)
        run.append(Run(progress.new.seq_id, count))
        budget -= count
    return StepPlan(step_id, start=tuple(start), run=tuple(run))


def _apply_result(by_id: dict[str, _Progress], result: StepResult) -> None:
    if result.failures:
        raise GenerationFailed(f"{result.failures[0].seq_id}: {result.failures[0].reason}")
    for output in result.outputs:
        progress = by_id[output.seq_id]
        progress.num_computed = output.num_computed_tokens
        progress.output.extend(output.token_ids)
        if output.finish_reason is not None and not progress.is_over:
            raise GenerationFailed(f"{output.seq_id} ended after {len(progress.output)} tokens")
