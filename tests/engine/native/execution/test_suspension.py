"""A step that is suspended at any layer, any number of times, computes what it would have computed at once."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import NewSequence, PlanError, Preempt, PreemptionMode, Run, StepEnd, StepPlan, StepResult
from engine.native.execution.torch_engine import TorchEngine
from engine.native.sampling.pipeline import SamplingPipeline
from engine.suspension import StepDropped
from tests.engine.conftest import MakeEngine
from tests.engine.contract.reported import Reported
from tests.engine.drive import Driven, drive, make_new, random_chunks
from tests.engine.models import CONFIGS, POISON, family, save_model
from tests.engine.native.cpu.compiled import PRODUCTS, library_with
from tests.engine.native.cpu.test_native_layer import CONFIGS as NATIVE_CONFIGS
from tests.engine.native.execution.test_oom_split import ScarceMemory
from tests.engine.suspending import Suspending
from tests.marks import mostly_full

MAX_TOKENS = 8
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "max_tokens": 3},
    {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "frequency_penalty": 0.7, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.1, "min_tokens": 4},
]


def test_engines_on_a_cpu_suspend_steps_unless_the_next_one_is_launched_early(make_engine: MakeEngine) -> None:
    assert all(make_engine(name).info.suspends_steps for name in ("llama", "gemma2", "phi"))
    assert make_engine(optimize=False).info.suspends_steps
    assert not make_engine(steps_ahead=1).info.suspends_steps


@pytest.mark.parametrize("optimize", [True, False])
def test_suspension_changes_neither_samples_nor_log_probabilities(make_engine: MakeEngine, optimize: bool) -> None:
    news = [
        make_new(k, p, seed=i, **{"max_tokens": MAX_TOKENS, **more})
        for i, ((k, p), more) in enumerate(zip(family(2).items(), OPTIONS, strict=True))
    ]
    alone = report_of(make_engine(prefix_cache=False, optimize=optimize), news, drive_plainly)
    for seed in range(2):
        rng = random.Random(seed)
        engine = make_engine(optimize=optimize)
        suspending = Suspending(engine, rng)

        def disturbed(
            _: Any, news: list[NewSequence], after: Any, rng: random.Random = rng, stepper: Suspending = suspending
        ) -> dict[str, Driven]:
            return drive(stepper, news, random_chunks(rng, 7), arrivals_a_step=2, after_step=after)

        assert report_of(engine, news, disturbed) == alone
        assert suspending.num_suspended >= 10 and suspending.num_beside >= 5 and suspending.dropped
        assert engine.num_used_blocks == 0


def drive_plainly(engine: Any, news: list[NewSequence], after: Any) -> dict[str, Driven]:
    return {new.seq_id: drive(engine, [new], after_step=after)[new.seq_id] for new in news}


def report_of(engine: TorchEngine, news: list[NewSequence], run: Any) -> dict[str, Any]:
    """Return each sequence's tokens, finish reason, and the tokens whose log probabilities were reported."""
    reported = Reported()
    driven = run(engine, news, reported)
    scores = {k: [[entry.token_id for entry in of[k]] for of in (reported.prompt, reported.output)] for k in driven}
    return {k: (d.output, d.finish_reason, scores[k]) for k, d in driven.items()}


# -- one step ----------------------------------------------------------------------------------------------------------


class OneStep:
    """A step of two decodes and a prefill, suspended before `layer`; then `beside` is stepped, and it goes on."""

    def __init__(self, engine: TorchEngine, layer: int, *beside: StepPlan, drops: bool = False) -> None:
        rng = random.Random(11)
        self.engine, self.results, self.num_layers = engine, list[StepResult](), 0
        self._layer, self._beside, self._drops = layer, beside, drops
        news = [
            make_new(name, [rng.randrange(1, 90) for _ in range(length)], max_tokens=4)
            for name, length in zip("abpx", (9, 30, 21, 17), strict=True)
        ]
        runs = tuple(Run(new.seq_id, len(new.prompt_token_ids)) for new in news)
        engine.step(StepPlan(0, start=(*news[:2], news[3]), run=(*runs[:2], runs[3])))
        engine.suspend_by(self)
        self.result = engine.step(StepPlan(1, start=(news[2],), run=(Run("a", 1), Run("p", 21), Run("b", 1))))

    def is_due(self) -> bool:
        self.num_layers += 1
        return self.num_layers == self._layer + 1

    def wait(self, suspended: StepResult) -> None:
        self.results.append(suspended)
        self.results += [self.engine.step(plan) for plan in self._beside]
        if self._drops:
            raise StepDropped


def tokens(result: StepResult) -> dict[str, tuple[int, ...]]:
    return {output.seq_id: output.token_ids for output in result.outputs}


def test_a_dropped_step_leaves_its_sequences_as_they_were(make_engine: MakeEngine) -> None:
    expected = tokens(OneStep(make_engine(), 9).result)
    engine = make_engine()
    step = OneStep(engine, 1, drops=True)
    assert (step.result.end, step.num_layers) == (StepEnd.DROPPED, 2), "at that layer"
    assert [(o.seq_id, o.num_computed_tokens, o.token_ids) for o in step.result.outputs] == [
        ("a", 9, ()),
        ("p", 0, ()),
        ("b", 30, ()),
    ]
    again = engine.step(StepPlan(2, run=(Run("a", 1), Run("p", 21), Run("b", 1))))
    assert tokens(again) == expected


def test_sequences_of_the_suspended_step_take_part_in_no_other(make_engine: MakeEngine) -> None:
    refused = [
        StepPlan(5, run=(Run("a", 1),)),
        StepPlan(5, abort=("p",)),
        StepPlan(5, preempt=(Preempt("b", PreemptionMode.PAUSE),)),
        StepPlan(5, preempt=(Preempt("b", PreemptionMode.RECOMPUTE),)),
        StepPlan(5, proceed_s=1.0, run=(Run("x", 1),)),
    ]
    for plan in refused:
        with pytest.raises(PlanError, match="suspended step"):
            OneStep(make_engine(), 0, plan)
    engine = make_engine()
    with pytest.raises(PlanError, match="no step is suspended"):
        engine.step(StepPlan(0, drop=True))


def test_other_sequences_start_end_and_are_preempted_beside_it(make_engine: MakeEngine) -> None:
    expected = tokens(OneStep(make_engine(), 9).result)
    new = make_new("new", range(3, 9), max_tokens=1)
    step = OneStep(
        make_engine(),
        1,
        StepPlan(2, start=(new,), run=(Run("x", 1), Run("new", 6))),
        StepPlan(3, preempt=(Preempt("x", PreemptionMode.RECOMPUTE),)),
        StepPlan(4, abort=("x",)),
    )
    assert step.result.end is StepEnd.DONE and tokens(step.result) == expected
    suspended, beside, *_ = step.results
    assert suspended.end is StepEnd.SUSPENDED and not suspended.outputs
    assert all(beside.token_ids for beside in beside.outputs)


def test_a_dropped_prefill_keeps_its_cached_blocks_and_caches_none_of_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = tuple(range(3, 33))
    engine.step(StepPlan(0, start=(make_new("first", prompt[:10], max_tokens=1),), run=(Run("first", 10),)))
    suspending = Suspending(engine, random.Random(1))
    suspending.is_due = lambda: True  # type: ignore[method-assign]
    suspending._rng.random = lambda: 0.0  # type: ignore[method-assign]
    result = suspending.step(StepPlan(1, start=(make_new("late", prompt, max_tokens=1),), run=(Run("late", 30),)))
    (output,) = result.outputs
    assert (output.num_computed_tokens, output.num_cached_tokens) == (8, 8)
    assert result.free_blocks == engine.info.num_blocks - 2
    undisturbed = Suspending(engine, random.Random(1), probability=0.0)
    other = make_new("other", prompt, max_tokens=1)
    (output,) = undisturbed.step(StepPlan(10, start=(other,), run=(Run("other", 30),))).outputs
    assert output.num_cached_tokens == 8, "what the dropped step computed is not found"
    (again,) = undisturbed.step(StepPlan(11, run=(Run("late", 22),))).outputs
    assert again.token_ids == output.token_ids


# -- suspension together with other events -----------------------------------------------------------------------------


@pytest.mark.parametrize("most_rows", [3, 16])
def test_suspension_of_a_step_that_is_computed_in_pieces(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    news = [
        make_new(k, p, seed=i, repetition_penalty=1.2, prompt_logprobs=0)
        for i, (k, p) in enumerate(family(5, count=5).items())
    ]
    engine, ample, rng = make_engine(), make_engine(), random.Random(most_rows)
    expected = report_of(ample, news, lambda engine, news, after: drive(engine, news, after_step=after))
    scarce = ScarceMemory(monkeypatch)
    scarce.most_rows = most_rows
    suspending = Suspending(engine, rng)

    def disturbed(_: TorchEngine, news: list[NewSequence], after: Any) -> dict[str, Driven]:
        return drive(suspending, news, arrivals_a_step=2, after_step=after)

    assert report_of(engine, news, disturbed) == expected
    assert scarce.num_refused > 0 and suspending.num_suspended > 0


def test_broken_sequences_fail_beside_suspended_ones(tmp_path: Path) -> None:
    """Another sequence may get the blocks that a dropped step gave back: it reads no NaN from them."""
    save_model(tmp_path, CONFIGS["llama"](), poisoned_token=POISON)
    config = EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=4, max_model_len=64, max_num_seqs=4)
    rng = random.Random(9)
    prompts = {f"s{i}": [rng.randrange(1, POISON) for _ in range(20)] for i in range(3)}
    expected = drive(build_torch_engine(config), [make_new(k, p) for k, p in prompts.items()])
    engine = build_torch_engine(config)
    broken = [make_new(f"broken{i}", [1, 2, POISON, *range(3, 20)]) for i in range(2)]
    suspending = Suspending(engine, rng, probability=0.5)
    news = [broken[0], *(make_new(k, p) for k, p in prompts.items()), broken[1]]
    driven = drive(suspending, news, random_chunks(rng, 9), arrivals_a_step=1)
    dropped = {seq_id for seq_ids in suspending.dropped for seq_id in seq_ids}
    assert dropped & set(prompts) and dropped & {"broken0", "broken1"}
    assert all(driven.pop(f"broken{i}").failure for i in range(2))
    assert {k: d.output for k, d in driven.items()} == {k: d.output for k, d in expected.items()}


# -- decoder layers in one call ----------------------------------------------------------------------------------------


@pytest.fixture(params=PRODUCTS)
def make_native(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library_with(request.param, monkeypatch)

    def make(name: str) -> TorchEngine:
        if not (tmp_path / "config.json").exists():
            save_model(tmp_path, NATIVE_CONFIGS[name]())
        # Prefills and decodes round differently: how a prompt is cut must not depend on suspensions.
        config = EngineConfig(str(tmp_path), dtype="bfloat16", kv_cache_bytes=1 << 21, block_size=8, prefix_cache=False)
        return build_torch_engine(config)

    return make


def fixed_chunk(s: Driven) -> int:
    """Cut a sequence into the same chunks whatever else runs."""
    return 1 + (5 * s.num_computed + len(s.new.prompt_token_ids)) % 9


@pytest.mark.parametrize("name", mostly_full(NATIVE_CONFIGS, "qwen3"))
def test_native_layers_go_on_with_their_own_step(name: str, make_native: Any) -> None:
    news = [make_new(k, [t % 90 for t in p], max_tokens=MAX_TOKENS) for k, p in family(3).items()]
    expected = drive(make_native(name), news, fixed_chunk, arrivals_a_step=2)
    suspending = Suspending(make_native(name), random.Random(name))
    driven = drive(suspending, news, fixed_chunk, arrivals_a_step=2)
    assert {k: d.output for k, d in driven.items()} == {k: d.output for k, d in expected.items()}
    assert suspending.num_suspended >= 10 and suspending.num_beside >= 5


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_suspended_step_of_native_layers_has_the_same_logits(
    make_native: Any, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """The logits are equal bit by bit, not only the tokens."""
    sample_tokens = SamplingPipeline.sample

    def logits_of(*beside: StepPlan) -> dict[str, torch.Tensor]:
        engine, seen = make_native("qwen3"), dict[str, torch.Tensor]()

        def watched(pipeline: SamplingPipeline, logits: torch.Tensor, sequences: Any, ahead: Any) -> Any:
            seen.update((s.seq_id, row.clone()) for s, row in zip(sequences, logits, strict=True))
            return sample_tokens(pipeline, logits, sequences, ahead)

        monkeypatch.setattr(SamplingPipeline, "sample", watched)
        OneStep(engine, layer, *beside)
        return seen

    new = make_new("new", range(3, 40), max_tokens=2)
    expected = logits_of()
    found = logits_of(StepPlan(2, start=(new,), run=(Run("new", 37), Run("x", 1))), StepPlan(3, run=(Run("new", 1),)))
    for name in "abp":
        assert torch.equal(found[name], expected[name]), name
