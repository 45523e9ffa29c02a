"""The engines that the contract is tested on, each built as a worker builds it, over one small model.

Knows how each engine is built; the tests know only `Engine`. All sizes in the tests are multiples of the engine's
block, because vLLM's blocks for CPUs are larger than those of the native engine.
"""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from engine.config import EngineConfig, KVCacheDtype, Quantization
from engine.factory import build_engine
from engine.interface import Engine, EngineInfo
from engine.modeled.engine import ModeledEngine
from engine.native.model.grouped_weight import rounded
from engine.thread import EngineThread
from engine.vllm.constraints import Constraints
from engine.vllm.stepper import VllmStepper
from tests.engine.models import save_model, tiny
from tests.engine.vllm.scripted import ScriptedExecutor

# Number of vLLM's processes, 1 or 2. The tests of vLLM run only where this variable is set.
VLLM_PROCESSES = os.environ.get("TIDEGATE_TEST_VLLM", "")
NEEDS_VLLM = pytest.mark.skipif(not VLLM_PROCESSES, reason="vLLM has an environment of its own: make test-vllm")

VOCAB_SIZE = 97
END = 0  # the model's end-of-sequence token
OTHER_END = 95  # its second one
POISON = 96  # a token after which all logits are NaN, and which the model never samples
MAX_TOKEN = 94  # the prompts of the tests have tokens from 1 to this one
LETTERS = [chr(code) for code in range(33, 127)]  # their texts
CONTEXT_BLOCKS = 12  # `max_model_len` in blocks
NUM_BLOCKS = 80
STEP_BLOCKS = 16  # `max_step_tokens` in blocks


def write_model(directory: Path) -> Any:
    """Write a model that all engines can run, with a tokenizer of single letters. Return it as transformers' model."""
    config = tiny(
        "Llama",
        hidden_size=128,
        head_dim=32,  # vLLM's kernels for CPUs know no smaller heads
        intermediate_size=64,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=[END, OTHER_END],
    )()
    ends = {"<|end|>": END, "<|other|>": OTHER_END}
    vocab = {**ends, **{letter: i for i, letter in enumerate(LETTERS, start=1)}}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True) for end in ends])
    tokenizer.save(str(directory / "tokenizer.json"))
    model = save_model(directory, config, poisoned_token=POISON)
    with torch.no_grad():
        _forbid_poison(model)
        _round_to_int8(model)
    model.save_pretrained(directory)
    return model


def _forbid_poison(model: Any) -> None:
    """Make the logit of `POISON` from the first number of the hidden states, which is positive everywhere."""
    model.get_input_embeddings().weight[:POISON, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[POISON] = 0.0
    model.lm_head.weight[POISON, 0] = -1000.0


def _round_to_int8(model: Any) -> None:
    """Give all linear layers weights that int8 holds exactly, so that quantised engines compute the same model."""
    for linear in (module for module in model.modules() if isinstance(module, torch.nn.Linear)):
        linear.weight.copy_(rounded(linear.weight, 8).unpacked(torch.float32))


def make_info(directory: Path, **more: Any) -> EngineInfo:
    return EngineInfo(
        str(directory),
        max_model_len=CONTEXT_BLOCKS * 4,
        vocab_size=VOCAB_SIZE,
        block_size=4,
        num_blocks=NUM_BLOCKS,
        max_step_tokens=STEP_BLOCKS * 4,
        eos_token_ids=(END, OTHER_END),
        **more,
    )


def build_modeled(directory: Path) -> Engine:
    modes = ("pause", "swap", "recompute")
    info = make_info(directory, preemption_modes=modes, num_swap_blocks=NUM_BLOCKS, verifies_drafts=True)
    return ModeledEngine(info, lambda seconds: asyncio.sleep(0), prefix_cache=True)


def build_modeled_ahead(directory: Path) -> Engine:
    return ModeledEngine(make_info(directory, steps_ahead=1), lambda seconds: asyncio.sleep(0), prefix_cache=True)


def build_native(
    directory: Path,
    quantize: Quantization | None = None,
    steps_ahead: Literal[0, 1] = 1,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> Engine:
    # Tokens, keys and values, layers, heads; numbers a head, with one scale or of 4 bytes each.
    block_bytes = 4 * 2 * 2 * 2 * (32 + 4 if kv_cache_dtype == "fp8" else 32 * 4)
    return build_engine(
        EngineConfig(
            str(directory),
            dtype="float32",
            quantize=quantize,
            device="cpu",
            block_size=4,
            max_model_len=CONTEXT_BLOCKS * 4,
            max_step_tokens=STEP_BLOCKS * 4,
            kv_cache_bytes=NUM_BLOCKS * block_bytes,
            kv_cache_dtype=kv_cache_dtype,
            optimize=kv_cache_dtype == "auto",  # on a CPU only torch's operators know FP8
            swap_bytes=NUM_BLOCKS * block_bytes,
            num_threads=1,
            steps_ahead=steps_ahead,
        )
    )


def build_scripted(directory: Path) -> Engine:
    """Build the engine over vLLM's executor with an executor of the tests: only what computes is missing."""
    info = make_info(directory, steps_ahead=1)
    return EngineThread(lambda: VllmStepper(info, ScriptedExecutor(), Constraints(info), prefix_cache=True))


def build_vllm(directory: Path) -> Engine:
    block_size = 32  # the smallest of vLLM's kernels for CPUs
    sizes = f"--block-size {block_size} --num-gpu-blocks-override {NUM_BLOCKS + 1}"  # vLLM's first block is not used
    return build_engine(
        EngineConfig(
            str(directory),
            engine="vllm",
            dtype="float32",
            max_model_len=CONTEXT_BLOCKS * block_size,
            max_step_tokens=STEP_BLOCKS * block_size,
            vllm_args=f"{sizes} --gpu-memory-utilization 0.2 --enforce-eager --tensor-parallel-size {VLLM_PROCESSES}",
        )
    )


# By name: the function that builds the engine, and the marks of its tests.
MADE_UP = ("modeled", "modeled-ahead", "scripted")  # engines that make their tokens up; the others compute a model
ROUNDED = ("fp8",)  # engines that round what transformers does not
ENGINES: dict[str, tuple[Callable[[Path], Engine], tuple[pytest.MarkDecorator, ...]]] = {
    "modeled": (build_modeled, ()),
    "modeled-ahead": (build_modeled_ahead, ()),
    "scripted": (build_scripted, ()),
    "native": (build_native, ()),
    "int8": (partial(build_native, quantize="int8"), ()),
    "in-turn": (partial(build_native, steps_ahead=0), ()),  # as usually on a CPU
    "fp8": (partial(build_native, kv_cache_dtype="fp8"), ()),
    "vllm": (build_vllm, (NEEDS_VLLM,)),
}
