"""Mid-step eviction at any layer, any number of times, changes no token of evicted and of remaining sequences."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import (
    FinishReason,
    NewSequence,
    Run,
    StepEviction,
    StepPlan,
)
from engine.native.execution.torch_engine import TorchEngine
from engine.native.sampling.pipeline import SamplingPipeline
from tests.engine.conftest import MakeEngine
from tests.engine.contract.reported import Reported
from tests.engine.drive import Driven, drive, make_new, random_chunks
from tests.engine.evictor import Choose, Evictor, at, at_random, never
from tests.engine.models import CONFIGS, POISON, family, save_model
from tests.engine.native.cpu.compiled import has_compiler, library_with
from tests.engine.native.cpu.test_native_layer import CONFIGS as NATIVE_CONFIGS
from tests.engine.native.execution.test_oom_split import ScarceMemory
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


def test_fused_layers_evict_single_rows_and_other_layers_whole_steps(make_engine: MakeEngine) -> None:
    fused = StepEviction.ROWS if has_compiler() else StepEviction.STEPS
    step_eviction = {name: make_engine(name).info.step_eviction for name in ("llama", "gemma2", "phi")}
    assert step_eviction == {"llama": fused, "gemma2": fused, "phi": StepEviction.STEPS}
    assert make_engine(optimize=False).info.step_eviction is StepEviction.STEPS
    assert make_engine(steps_ahead=1).info.step_eviction is StepEviction.NOTHING


def test_eviction_changes_neither_samples_nor_log_probabilities(make_engine: MakeEngine) -> None:
    news = [
        make_new(k, p, seed=i, **{"max_tokens": MAX_TOKENS, **more})
        for i, ((k, p), more) in enumerate(zip(family(2).items(), OPTIONS, strict=True))
    ]
    alone = report_of(make_engine(prefix_cache=False), news, drive_plainly)
    for seed in range(2):
        rng = random.Random(seed)
        engine = make_engine()
        evictor = Evictor(engine, at_random(rng, 2))

        def disturbed(
            _: Any, news: list[NewSequence], after: Any, rng: random.Random = rng, evictor: Evictor = evictor
        ) -> dict[str, Driven]:
            return drive(evictor, news, random_chunks(rng, 7), arrivals_a_step=2, after_step=after)

        assert report_of(engine, news, disturbed) == alone
        assert sum(map(bool, evictor.evicted)) >= 3
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


class EvictingStep:
    """One step with three decodes and one prefill, from which `choose` evicts."""

    def __init__(self, engine: TorchEngine, choose: Choose = never, vocab_size: int = POISON) -> None:
        self.evictor = Evictor(engine, lambda plan: choose(plan) if plan.step_id == 1 else {})
        rng = random.Random(11)
        news = [
            make_new(name, [rng.randrange(1, vocab_size) for _ in range(length)], max_tokens=4)
            for name, length in zip("abcp", (9, 30, 17, 21), strict=True)
        ]
        first = StepPlan(
            0, start=tuple(news[:3]), run=tuple(Run(new.seq_id, len(new.prompt_token_ids)) for new in news[:3])
        )
        self.evictor.step(first)
        runs = (Run("a", 1), Run("p", 21), Run("b", 1), Run("c", 1))
        self.result = self.evictor.step(StepPlan(1, start=(news[3],), run=runs))

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        return {output.seq_id: output.token_ids for output in self.result.outputs}


@pytest.mark.parametrize(("layer", "evictees"), [(0, "p"), (1, "a"), (1, "bp"), (0, "abc"), (1, "cap")])
def test_remaining_sequences_get_their_usual_tokens(make_engine: MakeEngine, evictees: str, layer: int) -> None:
    expected = EvictingStep(make_engine()).tokens
    step = EvictingStep(make_engine(), at(layer, *evictees))
    assert set(step.result.evicted) == set(evictees)
    assert [output.seq_id for output in step.result.outputs] == ["a", "p", "b", "c"], "in the order of the plan"
    assert step.tokens == {name: () if name in evictees else tokens for name, tokens in expected.items()}
    step.evictor._choose = never
    again = step.evictor.step(StepPlan(2, run=tuple(Run(name, 21 if name == "p" else 1) for name in evictees)))
    assert {output.seq_id: output.token_ids for output in again.outputs} == {name: expected[name] for name in evictees}


def test_a_step_without_remaining_sequences_ends_at_that_layer(make_engine: MakeEngine) -> None:
    step = EvictingStep(make_engine(), lambda plan: {0: {"b"}, 1: {"p", "a", "c"}})
    assert step.result.evicted == ("a", "p", "b", "c")
    assert step.evictor.num_layers == [2, 2]
    assert EvictingStep(make_engine(), at(0, *"abcp")).evictor.num_layers == [2, 1]


def test_a_model_that_evicts_whole_steps_only_ignores_other_requests(make_engine: MakeEngine) -> None:
    step = EvictingStep(make_engine(optimize=False), at(0, "a", "p"))
    assert step.result.evicted == () and all(step.tokens.values())
    step = EvictingStep(make_engine(optimize=False), lambda plan: {0: {"a", "p"}, 1: {"b", "c"}})
    assert step.result.evicted == ("a", "p", "b", "c"), "requests for one step add up"


def test_a_request_may_come_before_its_step_but_not_after_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    new = make_new("s", range(3, 9), max_tokens=4)
    engine.evict(1, {"s"})
    assert engine.step(StepPlan(0, start=(new,), run=(Run("s", 6),))).evicted == ()
    assert engine.step(StepPlan(1, run=(Run("s", 1),))).evicted == ("s",)
    engine.evict(1, {"s"})
    assert engine.step(StepPlan(2, run=(Run("s", 1),))).evicted == ()


def test_an_evicted_prefill_keeps_its_cached_blocks_and_caches_none_of_its_own(make_engine: MakeEngine) -> None:
    evictor = Evictor(make_engine(), lambda plan: {1: {"late"}} if plan.step_id in (1, 2) else {})
    prompt = tuple(range(3, 33))
    first = make_new("first", prompt[:10], max_tokens=1)
    evictor.step(StepPlan(0, start=(first,), run=(Run("first", 10),)))
    late = make_new("late", prompt, max_tokens=1)
    result = evictor.step(StepPlan(1, start=(late,), run=(Run("late", 30),)))
    (output,) = result.outputs
    assert (output.num_computed_tokens, output.num_cached_tokens) == (8, 8)
    assert result.free_blocks == evictor.info.num_blocks - 2
    (output,) = evictor.step(StepPlan(2, run=(Run("late", 22),))).outputs
    assert (output.num_computed_tokens, output.num_cached_tokens) == (8, 0)
    other = make_new("other", prompt, max_tokens=1)
    (output,) = evictor.step(StepPlan(3, start=(other,), run=(Run("other", 30),))).outputs
    assert output.num_cached_tokens == 8, "what the evicted steps computed is not found"
    (again,) = evictor.step(StepPlan(4, run=(Run("late", 22),))).outputs
    assert again.token_ids == output.token_ids and again.finish_reason is FinishReason.LENGTH


# -- eviction together with other events -------------------------------------------------------------------------------


@pytest.mark.parametrize("most_rows", [3, 16])
def test_eviction_from_a_step_that_is_computed_in_pieces(
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
    evictors: list[Evictor] = []

    def disturbed(engine: TorchEngine, news: list[NewSequence], after: Any) -> dict[str, Driven]:
        evictors.append(Evictor(engine, at_random(rng, 9, probability=0.5)))
        return drive(evictors[0], news, arrivals_a_step=2, after_step=after)

    assert report_of(engine, news, disturbed) == expected
    assert scarce.num_refused > 0 and any(evictors[0].evicted)


def test_broken_sequences_fail_and_evicted_ones_do_not(tmp_path: Path) -> None:
    """Another sequence may get the blocks that an evicted one gave back: it reads no NaN from them."""
    save_model(tmp_path, CONFIGS["llama"](), poisoned_token=POISON)
    config = EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=4, max_model_len=64, max_num_seqs=4)
    rng = random.Random(4)
    prompts = {f"s{i}": [rng.randrange(1, POISON) for _ in range(20)] for i in range(3)}
    expected = drive(build_torch_engine(config), [make_new(k, p) for k, p in prompts.items()])
    engine = build_torch_engine(config)
    broken = [make_new(f"broken{i}", [1, 2, POISON, *range(3, 20)]) for i in range(2)]
    evictor = Evictor(engine, at_random(rng, 2))
    news = [broken[0], *(make_new(k, p) for k, p in prompts.items()), broken[1]]
    driven = drive(evictor, news, random_chunks(rng, 9), arrivals_a_step=1)
    evicted = {seq_id for seq_ids in evictor.evicted for seq_id in seq_ids}
    assert evicted & set(prompts) and evicted & {"broken0", "broken1"}
    assert all(driven.pop(f"broken{i}").failure for i in range(2))
    assert {k: d.output for k, d in driven.items()} == {k: d.output for k, d in expected.items()}


# -- decoder layers in one call ----------------------------------------------------------------------------------------


@pytest.fixture(params=["dots", "tiles"])
def make_native(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library_with(request.param, monkeypatch)

    def make(name: str) -> TorchEngine:
        if not (tmp_path / "config.json").exists():
            save_model(tmp_path, NATIVE_CONFIGS[name]())
        # Prefills and decodes round differently: how a prompt is cut must not depend on evictions.
        config = EngineConfig(str(tmp_path), dtype="bfloat16", kv_cache_bytes=1 << 21, block_size=8, prefix_cache=False)
        engine = build_torch_engine(config)
        assert engine.info.step_eviction is StepEviction.ROWS
        return engine

    return make


def fixed_chunk(s: Driven) -> int:
    """Cut a sequence into the same chunks whatever else runs."""
    return 1 + (5 * s.num_computed + len(s.new.prompt_token_ids)) % 9


@pytest.mark.parametrize("name", mostly_full(NATIVE_CONFIGS, "qwen3"))
def test_native_layers_evict_single_rows(name: str, make_native: Any) -> None:
    news = [make_new(k, [t % 90 for t in p], max_tokens=MAX_TOKENS) for k, p in family(3).items()]
    expected = drive(make_native(name), news, fixed_chunk, arrivals_a_step=2)
    rng = random.Random(name)
    evictor = Evictor(make_native(name), at_random(rng, 3))
    driven = drive(evictor, news, fixed_chunk, arrivals_a_step=2)
    assert {k: d.output for k, d in driven.items()} == {k: d.output for k, d in expected.items()}
    assert sum(map(bool, evictor.evicted)) >= 5


@pytest.mark.parametrize(("layer", "evictees"), [(0, "cap"), (1, "abc"), (2, "p")])
def test_remaining_sequences_get_the_same_logits_from_native_layers(
    make_native: Any, monkeypatch: pytest.MonkeyPatch, evictees: str, layer: int
) -> None:
    """The logits are equal bit by bit, not only the tokens."""
    sample_tokens = SamplingPipeline.sample

    def logits_of(choose: Choose) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]:
        engine = make_native("qwen3")
        seen: dict[str, torch.Tensor] = {}

        def watched(pipeline: SamplingPipeline, logits: torch.Tensor, sequences: Any) -> Any:
            seen.update((s.seq_id, row.clone()) for s, row in zip(sequences, logits, strict=True))
            return sample_tokens(pipeline, logits, sequences)

        monkeypatch.setattr(SamplingPipeline, "sample", watched)
        step = EvictingStep(engine, choose, vocab_size=90)
        return step.tokens, {name: seen[name] for name, tokens in step.tokens.items() if tokens}

    expected_tokens, expected = logits_of(never)
    tokens, found = logits_of(at(layer, *evictees))
    assert tokens == {name: () if name in evictees else of for name, of in expected_tokens.items()}
    assert set(found) == set("abcp") - set(evictees)
    for name, row in found.items():
        assert torch.equal(row, expected[name]), name
