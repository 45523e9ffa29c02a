"""Async scheduling: the tokens are those of an engine that finalizes each step before it launches the next."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.engines.systems import scheduled
from bench.engines.systems.protocol import SystemSpec
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import NewSequence, Run, StepPlan, StepResult
from engine.native.execution.torch_engine import TorchEngine
from engine.thread import EngineThread
from tests.engine.conftest import ModelDirectory
from tests.engine.drive import drive, make_new

Build = Callable[..., TorchEngine]
PROMPTS = [range(3, 12), range(20, 24), range(5, 40), range(50, 58)]


@pytest.fixture
def build(model_directory: ModelDirectory) -> Build:
    def build_one(steps_ahead: Any = 1, **options: Any) -> TorchEngine:
        directory, _ = model_directory("llama")
        config = EngineConfig(str(directory), dtype="float32", kv_cache_bytes=1 << 20, block_size=4, **options)
        return build_torch_engine(replace(config, steps_ahead=steps_ahead))

    return build_one


def async_outputs(engine: TorchEngine, news: list[NewSequence]) -> dict[str, list[int]]:
    """Prefill, then decode: each step is launched before the one before it is finalized."""
    outputs: dict[str, list[int]] = {new.seq_id: [] for new in news}
    ended: set[str] = set()

    def take_in(result: StepResult) -> None:
        for output in result.outputs:
            assert output.seq_id not in ended, "a sequence that has ended has no output"
            outputs[output.seq_id] += output.token_ids
            if output.finish_reason is not None:
                ended.add(output.seq_id)
        ended.update(failure.seq_id for failure in result.failures)

    engine.launch(StepPlan(0, start=tuple(news), run=tuple(Run(n.seq_id, len(n.prompt_token_ids)) for n in news)))
    for step_id in range(1, 200):
        live = [new.seq_id for new in news if new.seq_id not in ended]
        if live:
            engine.launch(StepPlan(step_id, run=tuple(Run(seq_id, 1) for seq_id in live), ahead=True))
        take_in(engine.finalize())
        if not live:
            assert engine.num_used_blocks == 0
            return outputs
    raise AssertionError("the sequences do not end")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_sequences_end_at_lengths_and_stop_tokens(build: Build, sampling: dict[str, Any]) -> None:
    plain = build(steps_ahead=0)
    free = drive(plain, [make_new(f"s{i}", p, max_tokens=30, **sampling) for i, p in enumerate(PROMPTS)])
    # Half of them end at a stop token, when the next step is already launched; the others at their length.
    news = [
        make_new(
            f"s{i}", p, max_tokens=10 + 5 * i, stop_token_ids=tuple(free[f"s{i}"].output[8:9]) * (i % 2), **sampling
        )
        for i, p in enumerate(PROMPTS)
    ]
    expected = {name: s.output for name, s in drive(build(steps_ahead=0), news).items()}
    assert async_outputs(build(), news) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"logprobs": 2},
        {"min_tokens": 9},
        {"logit_bias": ((5, 3.0),)},
    ],
    ids=str,
)
def test_steps_that_need_the_host_are_not_left_on_the_device(build: Build, options: dict[str, Any]) -> None:
    """One sequence has such an option, the others have none."""
    news = [make_new(f"s{i}", p, max_tokens=20, **(options if i == 1 else {})) for i, p in enumerate(PROMPTS)]
    expected = {name: s.output for name, s in drive(build(steps_ahead=0), news).items()}
    assert async_outputs(build(), news) == expected


def test_an_ordinary_plan_waits_for_the_step_before_it(build: Build) -> None:
    engine, (first, second) = build(), [make_new(name, range(3, 9), max_tokens=9) for name in "ab"]
    engine.launch(StepPlan(0, start=(first,), run=(Run("a", 6),)))
    engine.launch(StepPlan(1, abort=("a",), start=(second,), run=(Run("b", 6),)))
    assert [output.seq_id for output in engine.finalize().outputs] == ["a"]
    assert [output.seq_id for output in engine.finalize().outputs] == ["b"]


def test_a_block_filled_with_placeholders_is_cached_with_its_real_tokens(build: Build) -> None:
    """A block enters the prefix cache when its tokens are known."""
    engine = build()
    new = make_new("a", range(3, 9), max_tokens=18)
    output = async_outputs(engine, [new])["a"]
    again = NewSequence("b", (*new.prompt_token_ids, *output[:-1]), new.sampling)
    result = engine.step(StepPlan(500, start=(again,), run=(Run("b", len(again.prompt_token_ids)),)))
    assert result.outputs[0].num_cached_tokens >= 20
    assert result.outputs[0].token_ids == (output[-1],)


async def test_the_thread_launches_a_plan_while_a_step_runs(build: Build) -> None:
    new = make_new("a", range(3, 9), max_tokens=40)
    expected = drive(build(steps_ahead=0), [new])["a"].output
    engine = EngineThread(build)
    try:
        engine.submit(StepPlan(0, start=(new,), run=(Run("a", 6),)))
        output: list[int] = []
        for step_id in range(1, 40):
            engine.submit(StepPlan(step_id, run=(Run("a", 1),), ahead=True))
            with pytest.raises(RuntimeError, match="in flight already"):
                engine.submit(StepPlan(1000, run=(Run("a", 1),), ahead=True))
            output += (await engine.collect()).outputs[0].token_ids
        output += (await engine.collect()).outputs[0].token_ids
    finally:
        engine.close()
    assert output == expected


def test_the_shipped_loop_schedules_asynchronously_and_gives_the_same_tokens(
    model_directory: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = model_directory("llama")
    config = EngineConfig(str(directory), dtype="float32", kv_cache_bytes=1 << 20, block_size=4)
    monkeypatch.setattr(scheduled, "engine_config", lambda spec: replace(config, steps_ahead=1))
    spec = SystemSpec(str(directory), "float32", "cpu", 1, 128, 8, 1024, 0)
    plain = drive(
        build_torch_engine(config),
        [make_new(f"s{i}", p, max_tokens=20 + i, ignore_eos=True) for i, p in enumerate(PROMPTS)],
    )
    system = scheduled.ScheduledEngine(spec)
    try:
        async_plans = 0
        plan_async = system._core.plan_async

        def counted(now: float) -> StepPlan | None:
            nonlocal async_plans
            plan = plan_async(now)
            async_plans += plan is not None
            return plan

        monkeypatch.setattr(system._core, "plan_async", counted)
        outputs = system.generate([list(p) for p in PROMPTS], [20 + i for i in range(4)])
    finally:
        system.close()
    assert outputs == [plain[f"s{i}"].output for i in range(4)]
    assert async_plans > 10
