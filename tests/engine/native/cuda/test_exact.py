"""The law of `--exact` with the kernels for CUDA: the bits of a row depend on its own sequence only.

On a GPU the kernels are compiled. Without one they run in Triton's interpreter: see `test_triton.py`.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.interface import PreemptionMode
from engine.native.attention.kernels import HeadShape, Scoring
from engine.native.attention.paged import PagedAttention
from engine.native.batch.packing import DecodeGroup, PrefillChunk, StepBatch
from engine.native.batch.tensors import StepTensors, decodes_to_chunks, to_cpu, upload_step
from engine.native.cuda.graph_sizes import GraphSize
from engine.native.execution.torch_engine import TorchEngine
from engine.native.kv.cache import KVCache, LayerShape
from tests.engine.conftest import MakeEngine
from tests.engine.contract.reported import Reported
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.native.cuda.rebuilt import with_graphs
from tests.engine.native.cuda.triton_here import DEVICE, HAS_GPU, NEEDS_TRITON
from tests.marks import mostly_full

pytestmark = [*NEEDS_TRITON, pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")]

DTYPES = mostly_full((torch.bfloat16, torch.float16, torch.float32), torch.bfloat16, torch.float32)
NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 20, 8, 150


@pytest.fixture
def exact_operators() -> Iterator[None]:
    from engine.native.cuda.exact_operators import use_exact_operators

    library = use_exact_operators(DEVICE.upper())
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_products_row_is_the_same_beside_any_others(dtype: torch.dtype, exact_operators: None) -> None:
    """In any number of rows, at any place, from a tensor that is not aligned, and with the layout of any weight."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(130, 150, generator=generator).to(DEVICE, dtype)
    linear = torch.nn.Linear(150, 97, device=DEVICE, dtype=dtype)
    with torch.inference_mode():
        together = linear(x)
        numbers, weight, bias = (t.detach().cpu().double().numpy() for t in (x, linear.weight, linear.bias))
        assert np.allclose(together.cpu().double().numpy(), numbers @ weight.T + bias, atol=0.02, rtol=0.02)
        for rows in ([0], [129], [5, 80], list(range(64, 130)), [*range(100, 0, -1)]):
            assert torch.equal(linear(x[rows]), together[rows])
        unaligned = torch.empty(151, device=DEVICE, dtype=dtype)[1:]
        assert torch.equal(linear(unaligned.copy_(x[7])[None])[0], together[7])
        assert torch.equal((x[None] @ linear.weight.T)[0, 3:4], x[3:4] @ linear.weight.T.contiguous())
        assert torch.equal(torch.bmm(x[None], linear.weight.T[None])[0], x @ linear.weight.T)


def test_a_mean_is_the_same_beside_any_others(exact_operators: None) -> None:
    x = torch.randn(2, 37, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    means = x.mean(-1, keepdim=True)
    assert means.shape == (2, 37, 1)
    torch.testing.assert_close(means[..., 0], x.sum(-1) / 300, atol=1e-6, rtol=1e-5)
    assert torch.equal(x[1:, 5:6].mean(-1, keepdim=True), means[1:, 5:6])
    torch.testing.assert_close(x.mean((0, 1)), x.sum((0, 1)) / 74, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(x.mean(), x.sum() / x.numel(), atol=1e-6, rtol=1e-5)


# heads, KV heads, head size; softcap; window; sinks
CASES = [
    pytest.param(HeadShape(6, 2, 16), None, None, False, id="plain"),
    pytest.param(HeadShape(4, 1, 32), 2.0, 40, True, id="softcap, window and sinks"),
    pytest.param(HeadShape(4, 2, 64), None, 7, False, id="window", marks=pytest.mark.full),
]


@pytest.mark.parametrize("fp8", mostly_full((False, True), False), ids=("plain", "fp8"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "softcap", "window", "has_sinks"), CASES)
def test_attention_is_the_same_in_any_chunks(
    fp8: bool, dtype: torch.dtype, shape: HeadShape, softcap: float | None, window: int | None, has_sinks: bool
) -> None:
    """A context in one chunk, in several, and token by token, beside padding rows."""
    from engine.native.cuda.kernels import TritonKernels

    generator = torch.Generator().manual_seed(4)
    own_shape, device = LayerShape(shape.num_kv_heads, shape.head_dim), torch.device(DEVICE)
    cache = KVCache([own_shape], NUM_BLOCKS, BLOCK_SIZE, dtype, device, fp8=fp8)
    numbers = torch.randn(cache.layers[0].slots.shape, generator=generator).to(device, dtype)
    key_value = numbers.view(2, 1, shape.num_kv_heads, -1, shape.head_dim)
    cache.layers[0].write(*key_value, torch.arange(len(numbers), device=device))
    query = torch.randn(shape.num_query_heads, CONTEXT, shape.head_dim, generator=generator).to(DEVICE, dtype)
    sinks = torch.randn(shape.num_query_heads, generator=generator).to(DEVICE) if has_sinks else None
    attention = PagedAttention(cache, [window], TritonKernels(num_processors=2, min_split=32, exact=True))

    def attend(chunks: list[tuple[int, int]], decodes: list[int], *, exact: bool = True) -> torch.Tensor:
        """Return the attention (CONTEXT, heads, head_dim); rows that are not computed are NaN."""
        attention.begin(step := step_of(chunks, decodes))
        if exact:
            decodes_to_chunks(step)
        rows = [*decodes, *(i for chunk in chunks for i in range(*chunk))]
        own = query[:, rows]
        found = attention.attend(0, own, own[:1], own[:1], Scoring(0.3).scaling, softcap, sinks)
        out = torch.full((CONTEXT, shape.num_query_heads, shape.head_dim), float("nan"), device=DEVICE, dtype=dtype)
        out[rows] = found
        return out

    whole = attend([(0, CONTEXT)], [])
    assert whole.isfinite().all()
    assert torch.equal(attend([(0, 3), (3, 50), (50, 143)], [143, 149, 144, 145, 146, 147, 148]), whole)
    alone = attend([], list(range(0, CONTEXT, 11)))
    assert torch.equal(alone[::11], whole[::11])
    if dtype is torch.float32 and window != 7:  # guards this test: splits by the number of rows round otherwise
        many, few = (attend([], rows, exact=False) for rows in (list(range(0, CONTEXT, 11)), [121, 132, 143]))
        assert not torch.equal(few[121:144:11], many[121:144:11])


def step_of(chunks: list[tuple[int, int]], decodes: list[int]) -> StepTensors:
    """Return a step of one sequence's tokens in these chunks and decodes."""
    table = np.random.default_rng(0).permutation(NUM_BLOCKS)
    rows = len(decodes) + sum(end - start for start, end in chunks)
    first_rows = np.cumsum([len(decodes), *(end - start for start, end in chunks)])
    zeros = np.zeros(rows, dtype=np.int64)
    contexts = np.array(decodes, dtype=np.int64) + 1
    groups = (DecodeGroup(0, len(decodes), np.tile(table, (len(decodes), 1)), contexts),) if decodes else ()
    prefills = tuple(PrefillChunk(int(row), *chunk, table) for row, chunk in zip(first_rows, chunks, strict=False))
    batch = StepBatch(zeros, zeros, zeros, zeros[:0], (), groups, prefills)
    return upload_step(batch, NUM_BLOCKS, BLOCK_SIZE, lambda arrays: to_cpu(arrays).to(DEVICE)).step


NEWS = [
    make_new("long", [(7 * i + i * i) % 90 for i in range(70)], max_tokens=6, logprobs=1),
    make_new("short", [5, 6, 7], max_tokens=9, logprobs=1, temperature=1.0, seed=3),
    make_new("middle", range(1, 24), max_tokens=7, logprobs=1),
]
Bits = dict[str, list[Any]]


def bits_of(engine: TorchEngine, rng: random.Random | None) -> Bits:
    """Return log probabilities of all tokens: each sequence alone, or together in a random schedule."""
    reported = Reported()
    if rng is None:
        for new in NEWS:
            drive(engine, [new], after_step=reported)
    else:
        preempt = random_preemption(rng, 0.2, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
        drive(engine, NEWS, random_chunks(rng, 80), preempt, after_step=reported)
    return dict(reported.output)


@pytest.fixture
def rebuilt(make_engine: MakeEngine) -> Callable[..., TorchEngine]:
    """Return a function that makes an engine with our kernels and graphs, exact or not."""
    from engine.native.cuda.kernels import TritonKernels
    from engine.native.cuda.layers import TritonLayerKernels

    def make(exact: bool, kv_cache_dtype: str = "auto") -> TorchEngine:
        memory = {"kv_cache_bytes": 1 << 19, "kv_cache_dtype": kv_cache_dtype}
        plain = make_engine("qwen3", optimize=False, prefix_cache=False, **memory)
        kernels = TritonKernels(num_processors=2, min_split=32, exact=exact)
        sizes = [GraphSize(4), GraphSize(1), GraphSize(2, 16)]
        engine, _, _ = with_graphs(plain, sizes, kernels, layers=TritonLayerKernels(), exact=exact)
        return engine

    return make


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="test_on_gpu.py has it on the GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_an_engines_rows_are_the_same_in_any_schedule(
    kv_cache_dtype: str, rebuilt: Callable[..., TorchEngine], exact_operators: None
) -> None:
    alone = bits_of(rebuilt(True, kv_cache_dtype), None)
    assert bits_of(rebuilt(True, kv_cache_dtype), random.Random(1)) == alone


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="the interpreter shows it for all devices")
def test_without_it_they_are_not(rebuilt: Callable[[bool], TorchEngine], exact_operators: None) -> None:
    """Guards the test above. Products are exact here, so the splits of decodes alone make the difference."""
    alone = bits_of(rebuilt(False), None)
    assert bits_of(rebuilt(False), random.Random(1)) != alone
