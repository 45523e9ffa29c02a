"""The formula of a step's cost: what a chunk attends to, and that a step is the sum of its runs."""

import pytest

from engine.step_time.cost import StepCost, StepWork

COST = StepCost(step_s=0.02, prefill_token_s=0.0004, attend_s=1e-7, context_token_s=1e-6, decode_s=0.0006)


def test_a_chunk_attends_to_its_context_and_to_half_of_itself() -> None:
    cost = StepCost(step_s=0, prefill_token_s=1, attend_s=1, context_token_s=1, decode_s=1)
    assert cost.prefill(10, context=100) == 10 + 10 * (100 + 5)
    assert cost.run(1, 100) == cost.decode(100) == 101
    whole, parts = cost.attend_s * 20 * 10, sum(10 * (c + 5) for c in (0, 10))
    assert whole == parts, "a prefill attends to as much in two chunks as in one"


def test_a_whole_step_is_the_sum_of_its_runs() -> None:
    work = StepWork()
    for num_tokens, context in (runs := [(1, 300), (1, 20), (64, 128)]):
        work.add(num_tokens, context)
    assert COST.of(work) == pytest.approx(COST.step_s + sum(COST.run(*run) for run in runs))
