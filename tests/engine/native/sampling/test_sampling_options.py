"""Sampling options in the whole engine, with the demo model. What all engines share is in `tests/engine/contract`."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from demo_model.location import demo_model_path
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import (
    EngineInfo,
    FinishReason,
    Run,
    StepPlan,
)
from engine.native.execution.torch_engine import TorchEngine
from engine.native.sampling.pipeline import SamplingPipeline
from engine.sequences.sequence import Sequence
from tests.engine.conftest import MakeEngine
from tests.engine.drive import Driven, drive, make_new
from tests.engine.models import CONFIGS, POISON, VOCAB_SIZE, save_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
# With free whitespace, a small model may write nothing else.
JSON_GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


def demo_engine() -> TorchEngine:
    """Return an engine with the demo model in fp32 and small blocks."""
    return build_torch_engine(
        EngineConfig(
            str(demo_model_path()), dtype="float32", device="cpu", block_size=8, max_num_seqs=8, max_model_len=512
        )
    )


def test_the_state_of_sampling_options_is_freed_with_the_sequence() -> None:
    info = EngineInfo(str(demo_model_path()), 64, 1024, 4, 4, 64, eos_token_ids=(4,))
    pipeline = SamplingPipeline(info)
    new = make_new("a", [1, 2], repetition_penalty=1.5, grammar=regex("a+"))
    sequence = Sequence(replace(new, compiled_grammar=pipeline.grammars.compile(regex("a+"))), 64, (4,))
    (outcome,) = pipeline.sample(torch.zeros(1, 1024), [sequence])
    assert outcome.token_id is not None
    gone = weakref.ref(sequence)
    del sequence
    gc.collect()
    assert gone() is None


# -- grammars --------------------------------------------------------------------------------------------------------


def answer(tokenizer: Tokenizer, driven: Driven) -> str:
    return tokenizer.decode(driven.output)


def test_a_json_schema_produces_valid_json(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Give me JSON.").ids
    options: dict[str, Any] = {"max_tokens": 200, "grammar": JSON_GRAMMAR}
    news = [make_new(f"s{i}", prompt, seed=i, temperature=0.5 * i, **options) for i in range(4)]
    plain = make_new("plain", prompt, max_tokens=20)
    for seq_id, driven in drive(demo_engine(), [*news, plain], arrivals_a_step=2).items():
        if seq_id != "plain":
            assert driven.finish_reason is FinishReason.STOP, driven
            assert driven.output[-1] in (4, 0)
            jsonschema.validate(json.loads(answer(tokenizer, driven)), SCHEMA)


def test_a_step_never_compiles_a_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the vocabulary is read before: reading it would hold up every stream."""
    engine = demo_engine()
    monkeypatch.setattr("engine.grammar.Grammars._read_tokenizer", None)
    new = make_new("a", tokenizer.encode("Hello").ids, max_tokens=20, grammar=regex("yes|no"))
    engine.compile_grammar(regex("yes|no"))
    monkeypatch.setattr("engine.grammar.LLMatcher", None)
    assert answer(tokenizer, drive(engine, [new])["a"]) in ("yes", "no")
    with pytest.raises(TypeError, match="not callable"):
        engine.compile_grammar(regex("another"))


# -- ends and failures -----------------------------------------------------------------------------------------------


def test_options_that_exclude_all_tokens_fail_only_their_sequence(make_engine: MakeEngine) -> None:
    nothing = make_new("a", [1, 2], stop_token_ids=tuple(range(VOCAB_SIZE)), min_tokens=2)
    driven = drive(make_engine(), [nothing, make_new("b", [1, 2])])
    assert "no token to choose" in str(driven["a"].failure)
    assert len(driven["b"].output) == 8


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.2}, {"logprobs": 3, "prompt_logprobs": 3}, {"min_tokens": 3}]
)
def test_broken_logits_are_found_with_any_options(options: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"](), poisoned_token=POISON)
    engine = build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", device="cpu", max_num_seqs=4))
    news = [make_new("good", [1, 2, 3], **options), make_new("bad", [1, POISON, 3], **options)]
    result = engine.step(StepPlan(0, start=tuple(news), run=(Run("good", 3), Run("bad", 3))))
    assert [output.seq_id for output in result.outputs] == ["good"]
    assert [failure.seq_id for failure in result.failures] == ["bad"]
    assert "not finite" in result.failures[0].reason
