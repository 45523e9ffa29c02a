"""Jobs from a seed."""

import pytest

from bench.engines.work import (
    QUICK_SHAPES,
    SHAPES,
    STEP_TOKENS,
    WorkKind,
    WorkShape,
    longest_sequence,
    make_job,
    make_step_jobs,
)


@pytest.mark.parametrize("kind", WorkKind)
@pytest.mark.parametrize("shapes", [SHAPES, QUICK_SHAPES])
def test_lengths_and_ids_are_within_their_bounds(kind: WorkKind, shapes: dict[WorkKind, WorkShape]) -> None:
    shape = shapes[kind]
    job = make_job(shape, 50, 100, 1, kind)
    assert len(job.prompts) == len(job.new_tokens) == 50
    assert all(shape.prompt[0] <= len(prompt) <= shape.prompt[1] for prompt in job.prompts)
    assert all(shape.new[0] <= count <= shape.new[1] for count in job.new_tokens)
    assert all(0 <= token < 100 for prompt in job.prompts for token in prompt)
    assert job.longest <= longest_sequence(shapes.values())


def test_the_same_seed_and_name_give_the_same_job_and_another_round_another() -> None:
    shape = SHAPES[WorkKind.DECODE]
    job = make_job(shape, 4, 1000, 7, "decode", 4, 0)
    assert job == make_job(shape, 4, 1000, 7, "decode", 4, 0)
    assert job != make_job(shape, 4, 1000, 7, "decode", 4, 1)
    assert job != make_job(shape, 4, 1000, 8, "decode", 4, 0)


def test_the_two_jobs_of_a_step_differ_by_its_tokens_alone() -> None:
    short, long = make_step_jobs(3, 1000, 1, 0)
    assert [len(p) for p in short.prompts] == [len(p) for p in long.prompts]
    assert [b - a for a, b in zip(short.new_tokens, long.new_tokens, strict=True)] == [STEP_TOKENS] * 3
    assert not set(short.prompts) & set(long.prompts)


def test_parts_of_a_job_go_round_in_a_ring() -> None:
    job = make_job(SHAPES[WorkKind.MIXED], 3, 1000, 1)
    assert (job.ring(2, 2), job.ring(0, 9)) == ([2, 0], [0, 1, 2])
    part = job.pick([2, 0])
    assert part.prompts == (job.prompts[2], job.prompts[0])
    assert part.num_new_tokens == job.new_tokens[2] + job.new_tokens[0]
