"""A model with one call per layer compared with transformers' layers, in bfloat16.

Steps mix prefills, chunks after a context, and decodes.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from engine.config import EngineConfig, Quantization
from engine.factory import build_torch_engine
from engine.interface import NewSequence, Run, SamplingParams, StepPlan
from engine.native.batch.packing import pack_step
from engine.native.cpu.huge_pages import HugePages
from engine.native.cpu.native_layer import NativeDecoderLayer
from engine.native.model.quantized import QuantizedLinear
from engine.sequences.sequence_table import SequenceTable
from tests.engine.models import POISON, save_model
from tests.engine.native.cpu.compiled import PRODUCTS, library_with

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# With larger numbers, a router's near tie that rounding decides otherwise changes the rows after it, too.
EXPERTS: dict[str, Any] = {
    **SIZES,
    "initializer_range": 0.1,
    "num_experts": 9,
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "biases": lambda: LlamaConfig(**SIZES, attention_bias=True),
    "wide heads": lambda: LlamaConfig(**{**SIZES, "head_dim": 64, "num_key_value_heads": 1}),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "window": lambda: MistralConfig(**SIZES, sliding_window=9),
    "gemma2": lambda: Gemma2Config(**SIZES, **WINDOWS, query_pre_attn_scalar=16, attn_logit_softcapping=1.0),
    "gemma3": lambda: Gemma3TextConfig(**{**SIZES, "head_dim": 256}, **WINDOWS, query_pre_attn_scalar=256),
    "phi3": lambda: Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "granite": lambda: GraniteConfig(**SIZES, residual_multiplier=0.5, attention_multiplier=0.2),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "gelu": lambda: Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, hidden_act="gelu_pytorch_tanh"),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "glm4": lambda: Glm4Config(**SIZES),
    "mixtral": lambda: MixtralConfig(**EXPERTS, sliding_window=9),
    "qwen3-moe": lambda: Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True),
    "qwen2-moe": lambda: Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=64),
    "olmoe": lambda: OlmoeConfig(**EXPERTS),
    "gpt-oss": lambda: GptOssConfig(**EXPERTS, **WINDOWS, rope_parameters=ROPE),
}
WITH_EXPERTS = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "gpt-oss")
# (sequence, tokens) of each step; three sequences with prompts of 40 tokens.
STEPS = (
    ((0, 13),),
    ((0, 20), (1, 1)),
    ((0, 6), (1, 1), (2, 40)),
    ((0, 1), (1, 38)),
    ((0, 1), (1, 1), (2, 1)),
)


@pytest.fixture(autouse=True, params=PRODUCTS)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library_with(request.param, monkeypatch)


Steps = Sequence[Sequence[tuple[int, int]]]


def prompt_of(sequence: int) -> tuple[int, ...]:
    return tuple(torch.randint(POISON, (40,), generator=torch.Generator().manual_seed(sequence)).tolist())


def logits_of_steps(
    directory: Path,
    optimize: bool = True,
    quantize: Quantization | None = None,
    steps: Steps = STEPS,
    prompt: Callable[[int], tuple[int, ...]] = prompt_of,
) -> tuple[Any, list[Tensor]]:
    """Return the model and, of each step that completes sequences, the logits after them (sequences, vocab)."""
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_bytes": 1 << 20, "block_size": 8}
    config = EngineConfig(str(directory), optimize=optimize, quantize=quantize, **options)
    engine = build_torch_engine(config)
    table, found = SequenceTable(engine.info), []
    for step_id, runs in enumerate(steps):
        new = [NewSequence(str(i), prompt(i), SamplingParams(9)) for i, _ in runs if str(i) not in table]
        plan = StepPlan(step_id, start=tuple(new), run=tuple(Run(str(i), n) for i, n in runs))
        chunks = table.begin(plan)
        logits = engine._runner.run(pack_step(chunks, engine.info.block_size))
        if logits is not None:
            found.append(logits.float())
        for chunk in chunks:
            table.advance(chunk, (7,) if chunk.samples else ())
    return engine._runner._model, found


def multiply_rounded(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Compute the layer for rows that are rounded to bytes, 32 inputs with a step, as the C++ products do."""
    groups = x.float().unflatten(-1, (-1, 32))
    steps = groups.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (groups / steps.clamp(min=1e-30)).round() * steps
    bias = None if layer.bias is None else layer.bias.float()
    return torch.nn.functional.linear(rounded.flatten(-2), layer.unpacked(torch.float32), bias).to(x.dtype)


@pytest.mark.parametrize(
    ("name", "quantize"),
    [*((name, None) for name in CONFIGS), *product(("biases", "gemma3", *WITH_EXPERTS), ("int8", "int4"))],
)
def test_a_layer_in_one_call_computes_the_same(
    name: str, quantize: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, CONFIGS[name]())
    native, actual = logits_of_steps(tmp_path, True, quantize)
    monkeypatch.setattr(QuantizedLinear, "forward", multiply_rounded)
    _, expected = logits_of_steps(tmp_path, False, quantize)
    layers = [module for module in native.modules() if isinstance(module, NativeDecoderLayer)]
    assert [layer.has_experts for layer in layers] == [name in WITH_EXPERTS] * 3
    assert len(actual) == len(expected) == 3
    allowed = 0.06 if quantize is None else 0.12  # a step of a byte is larger than one of bfloat16
    errors = torch.cat([(a - b).norm(dim=1) / b.norm(dim=1) for a, b in zip(actual, expected, strict=True)])
    assert (errors.median() if name in WITH_EXPERTS else errors.max()) < allowed  # routers' near ties may differ


def test_the_weights_of_all_layers_are_in_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, CONFIGS["llama"]())
    plain, keep, sizes = logits_of_steps(tmp_path, False)[0], HugePages.keep, []

    def keep_and_count(self: HugePages, tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return keep(self, tensor)

    monkeypatch.setattr(HugePages, "keep", keep_and_count)
    logits_of_steps(tmp_path)
    expected = sum(weight.nbytes for name, weight in plain.named_parameters() if name.endswith("proj.weight"))
    assert sum(sizes) >= expected > 0


def test_quantised_experts_of_other_sizes_are_left_to_their_module(tmp_path: Path) -> None:
    """Groups have 32 inputs, and bfloat16 products take 16 at a time."""
    save_model(tmp_path, Qwen3MoeConfig(**{**EXPERTS, "moe_intermediate_size": 48}, norm_topk_prob=True))
    plain, _ = logits_of_steps(tmp_path)
    quantized, logits = logits_of_steps(tmp_path, quantize="int8")
    assert sum(isinstance(module, NativeDecoderLayer) for module in plain.modules()) == 3
    assert not any(isinstance(module, NativeDecoderLayer) for module in quantized.modules())
    assert all(found.isfinite().all() for found in logits)


OWN_FORMS: list[tuple[str, Quantization | None]] = [
    *((name, None) for name in ("llama", "olmo2", "glm4", "qwen3-moe", "qwen2-moe", "gpt-oss")),
    ("llama", "int4"),
    ("qwen3-moe", "int4"),
    ("qwen2-moe", "int8"),
    ("gpt-oss", "int4"),
]


@pytest.mark.parametrize(("name", "quantize"), OWN_FORMS)
def test_a_sequence_has_the_same_numbers_beside_others_and_with_several_threads(
    name: str, quantize: Quantization | None, tmp_path: Path
) -> None:
    """Law 9, bit for bit: which rows share a step, and so the rows of an expert, changes nothing."""
    save_model(tmp_path, CONFIGS[name]())
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _, together = logits_of_steps(tmp_path, quantize=quantize)
    finally:
        torch.set_num_threads(threads)
    steps_of = [[tuple(run for run in runs if run[0] == i) for runs in STEPS] for i in range(3)]
    alone = [
        logits_of_steps(tmp_path, quantize=quantize, steps=[runs for runs in steps if runs])[1] for steps in steps_of
    ]
    completed = ((2, 0), (0, 0), (1, 0), (0, 1), (1, 1), (2, 1))  # sequence, and which of its completed steps
    assert torch.equal(torch.cat(together), torch.cat([alone[i][j] for i, j in completed]))


@pytest.mark.parametrize(("name", "is_quantized"), [(name, quantize is not None) for name, quantize in OWN_FORMS])
def test_a_nan_stays_in_its_sequence(name: str, is_quantized: bool, tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS[name](), poisoned_token=POISON)
    quantize: Quantization | None = "int8" if is_quantized else None  # int4 measures inputs, also of this token

    def poisoned_prompt(i: int) -> tuple[int, ...]:
        return (POISON, *prompt_of(i)[1:]) if i == 1 else prompt_of(i)

    _, plain = logits_of_steps(tmp_path, quantize=quantize)
    _, poisoned = logits_of_steps(tmp_path, quantize=quantize, prompt=poisoned_prompt)
    assert all(logits.isfinite().all() for logits in plain)
    assert poisoned[1][1].isnan().all() and poisoned[2][1].isnan().all()
    assert torch.equal(poisoned[0], plain[0])
    assert torch.equal(poisoned[2][[0, 2]], plain[2][[0, 2]])
