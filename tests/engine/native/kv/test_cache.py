"""The KV cache in FP8: what a row keeps of its numbers, the bytes it takes, and what a model loses."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from demo_model.location import demo_model_path
from demo_model.training import skills
from engine.config import EngineConfig, EngineStartError, KVCacheDtype
from engine.factory import build_torch_engine
from engine.native.kv.cache import HeadRows, KVCache, LayerShape, block_bytes, from_fp8, to_fp8
from tests.engine.conftest import MakeEngine
from tests.engine.contract.reported import Reported
from tests.engine.drive import drive, make_new

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), st.sampled_from(DTYPES))
def test_a_number_keeps_four_bits_of_precision(numbers: list[float], dtype: torch.dtype) -> None:
    """Half a step of the mantissa's 3 bits, or half of the smallest number beside the row's largest, 2⁻⁹ ÷ 448."""
    row = torch.tensor([numbers]).to(dtype)
    found = from_fp8(*to_fp8(row), torch.float32)
    error, exact = (found - row.float()).abs(), row.float()
    allowed = torch.maximum(exact.abs() / 16, exact.abs().max() * 2**-10 / 448)
    assert (error <= allowed * 1.001 + 1e-37).all()


def test_a_row_depends_on_no_other_and_keeps_a_nan() -> None:
    rows = torch.randn(50, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 50)[:, None]
    rows[7, 3], rows[9] = torch.nan, 0.0
    together = to_fp8(rows)
    for row in (0, 8, 9, 49):
        assert all(
            torch.equal(one[0], many[row]) for one, many in zip(to_fp8(rows[row : row + 1]), together, strict=True)
        )
    again = from_fp8(*together, torch.float32)
    assert again[7].isnan().all()
    assert again.isfinite().sum() == 49 * 24
    assert torch.equal(again[9], rows[9])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_gathered_and_cleared(dtype: torch.dtype) -> None:
    cache, generator = KVCache([LayerShape(2, 8)] * 3, 5, 4, dtype, CPU, fp8=True), torch.Generator().manual_seed(2)
    key, value = (torch.randn(1, 2, 6, 8, generator=generator).to(dtype) for _ in range(2))
    slots = torch.tensor([4, 5, 6, 7, 12, 13])  # blocks 1 and 3
    cache.layers[1].write(key, value, HeadRows(slots, 20).of(2))
    blocks = HeadRows(torch.tensor([1, 3]), 5).of(2)
    keys, values = cache.layers[1].gather(blocks, 1)
    assert keys.dtype is dtype
    for found, given_rows in ((keys, key), (values, value)):
        assert torch.equal(found[:, :6], from_fp8(*to_fp8(given_rows[0]), dtype))
        assert (found[:, 6:] == 0).all()
    assert all((part == 0).all() for layer in (0, 2) for part in cache.layers[layer].gather(blocks, 1))
    cache.clear(torch.tensor([1, 3]))
    assert all((part == 0).all() for part in cache.layers[1].gather(blocks, 1))


@pytest.mark.parametrize("fp8", [False, True])
def test_the_bytes_of_a_block_are_those_of_its_tensors(fp8: bool) -> None:
    shapes = [LayerShape(2, 64), LayerShape(1, 128), LayerShape(2, 64)]
    contents = KVCache(shapes, 3, 16, torch.bfloat16, CPU, fp8=fp8).read_blocks(torch.tensor([1]))
    assert sum(c.nbytes for c in contents) == block_bytes(shapes, 16, torch.bfloat16, fp8=fp8)


def test_twice_as_many_tokens_fit(make_engine: MakeEngine) -> None:
    """The tiny model's heads have 8 numbers, so that a row takes 8 + 4 bytes instead of 32 (float32)."""
    few, many = (
        make_engine(optimize=False, kv_cache_bytes=1 << 16, kv_cache_dtype=kind).info.num_blocks
        for kind in ("auto", "fp8")
    )
    head = 8
    assert many == pytest.approx(few * 4 * head / (head + 4), abs=1)


def test_a_cpu_refuses_it_with_the_way_out(make_engine: MakeEngine) -> None:
    with pytest.raises(EngineStartError, match="no kernels on a CPU: leave it out, or .*--no-optimize"):
        make_engine(kv_cache_dtype="fp8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_model_loses_little(dtype: str) -> None:
    """Perplexity of the right answers (it was not trained to predict questions), and its own answers."""
    rng, tokenizer = random.Random(1), AutoTokenizer.from_pretrained(demo_model_path())
    pairs = [skills.repeat(rng, skills.make_nonce(rng)) for _ in range(8)] + [skills.count(rng, 40) for _ in range(4)]
    asked = [{"role": "user", "content": prompt} for prompt, _ in pairs]
    questions = [tokenizer.apply_chat_template([q], add_generation_prompt=True)["input_ids"] for q in asked]
    whole = [
        tokenizer.apply_chat_template([q, {"role": "assistant", "content": answer}])["input_ids"]
        for q, (_, answer) in zip(asked, pairs, strict=True)
    ]

    def measured(kind: KVCacheDtype) -> tuple[float, int]:
        """Return the perplexity, and the number of right answers."""
        settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 512, "max_num_seqs": 16, "kv_cache_dtype": kind}
        engine = build_torch_engine(EngineConfig(str(demo_model_path()), device="cpu", optimize=False, **settings))
        news = [make_new(str(i), ids, max_tokens=200) for i, ids in enumerate(questions)]
        driven = drive(engine, news)
        answers = [tokenizer.decode(driven[str(i)].output, skip_special_tokens=True) for i in range(len(pairs))]
        right = sum(answer == pair[1] for answer, pair in zip(answers, pairs, strict=True))
        reported = Reported()
        texts = [make_new(str(i), ids, max_tokens=1, prompt_logprobs=0) for i, ids in enumerate(whole)]
        drive(engine, texts, after_step=reported)
        entries = [entry for i, ids in enumerate(questions) for entry in reported.prompt[str(i)][len(ids) - 1 :]]
        return math.exp(-sum(entry.logprob for entry in entries) / len(entries)), right

    (plain, plain_right), (fp8, fp8_right) = measured("auto"), measured("fp8")
    assert fp8 != plain
    assert fp8 == pytest.approx(plain, rel=0.01), (plain, fp8)
    assert plain_right == fp8_right == len(pairs)
