"""The Triton kernels compared with their definitions, and used in a whole engine.

On a GPU they are compiled and run there. Without one they run in Triton's interpreter, which must be switched on before
torch is imported: `test_interpreter.py` starts a process for that; other processes skip these tests.
"""

import random
from itertools import product
from typing import Any

import pytest
import torch

from engine.interface import SamplingParams
from engine.native.attention.kernels import AttentionKernels, HeadShape, Scoring
from engine.native.batch.tensors import to_cpu
from engine.native.cuda.graph_sizes import GraphSize
from engine.native.execution.torch_engine import TorchEngine
from engine.native.kv.cache import LayerShape, to_fp8
from engine.native.model.grouped_weight import GroupedWeight, rounded
from engine.native.model.layer_kernels import LayerKernels
from engine.native.model.quantized import QuantizedLinear
from engine.native.startup.cuda_bring_up import fuse_with_kernels
from engine.native.startup.cuda_trial import find_fault, sampler_fault
from engine.native.startup.probe import LayerSpec
from engine.sampling.sampler import SamplingRow, sample_ids
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.contract.reported import Reported, assert_alike
from tests.engine.drive import drive, make_new, random_chunks
from tests.engine.models import VOCAB_SIZE, generate
from tests.engine.native.cuda.rebuilt import with_graphs, with_kernels
from tests.engine.native.cuda.triton_here import DEVICE, HAS_GPU, NEEDS_TRITON
from tests.engine.native.reference import (
    TOLERANCES,
    RandomCache,
    check_activate_and_mul,
    check_decode,
    check_nan,
    check_norms,
    check_prefill,
    check_rotate_and_write,
)
from tests.marks import mostly_full

pytestmark = NEEDS_TRITON

NUM_BLOCKS = 40
DTYPES = (torch.float32, torch.bfloat16)

# heads, KV heads, head size; softcap; window; sinks; block size; dtype
CASES = [
    (HeadShape(4, 4, 16), None, None, False, 16, torch.float32),
    (HeadShape(6, 2, 20), 2.0, 5, True, 16, torch.float32),
    (HeadShape(9, 3, 64), None, 40, False, 32, torch.bfloat16),
    (HeadShape(17, 1, 80), None, None, True, 16, torch.float32),
    (HeadShape(4, 1, 128), 3.0, None, False, 32, torch.float16),
    (HeadShape(2, 1, 256), None, 33, False, 16, torch.bfloat16),
]
FEW = [pytest.param(case, marks=() if case == CASES[1] else pytest.mark.full) for case in CASES]


def name_of(case: Any) -> str:
    shape, softcap, window, has_sinks, block_size, dtype = case
    extras = [f"cap{softcap}"] * bool(softcap) + [f"window{window}"] * bool(window) + ["sinks"] * has_sinks
    heads = f"{shape.num_query_heads}-{shape.num_kv_heads}-{shape.head_dim}"
    return "-".join([heads, *extras, f"block{block_size}", str(dtype).removeprefix("torch.")])


@pytest.fixture
def kernels() -> AttentionKernels:
    from engine.native.cuda.kernels import TritonKernels

    return TritonKernels(num_processors=2, min_split=32)  # splits even short contexts


@pytest.fixture
def layer_kernels() -> LayerKernels:
    from engine.native.cuda.layers import TritonLayerKernels

    return TritonLayerKernels()


@pytest.mark.parametrize("fp8", [False, True], ids=("plain", "fp8"))
@pytest.mark.parametrize("case", FEW, ids=name_of)
def test_attention(kernels: AttentionKernels, case: Any, fp8: bool) -> None:
    """The chunks are a whole prompt, the end of a longer prompt and the middle of another."""
    shape, softcap, window, has_sinks, block_size, dtype = case
    assert kernels.can_attend(shape)
    cache = RandomCache(shape, block_size, NUM_BLOCKS, dtype, DEVICE, [1, block_size, 0, 33, 500], fp8=fp8)
    scoring = Scoring(0.2, softcap, window, cache.sinks if has_sinks else None)
    assert (check_decode(kernels, cache, scoring)[2] == 0).all(), "a row of length 0"
    chunks = RandomCache(shape, block_size, NUM_BLOCKS, dtype, DEVICE, [5, 83, 69], fp8=fp8)
    check_prefill(kernels, chunks, [0, 70, 30], scoring)


@pytest.mark.parametrize("fp8", [False, True], ids=("plain", "fp8"))
def test_a_nan_in_a_context_affects_its_own_row_only(kernels: AttentionKernels, fp8: bool) -> None:
    check_nan(kernels, torch.float32, DEVICE, fp8=fp8)


SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.0001},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 10_000, "min_p": 0.1},
    {"temperature": 1e-3, "top_p": 0.9, "min_p": 0.5},
]


@pytest.mark.parametrize(
    ("vocab", "dtype"), mostly_full(product((7, 300, 9000), (*DTYPES, torch.float16)), (300, torch.bfloat16))
)
def test_sampling_is_that_of_the_definition(vocab: int, dtype: torch.dtype) -> None:
    """Also with equal logits, of which a bfloat16 has many, and rows that cannot be sampled."""
    from engine.native.cuda.sampler import TritonSampler

    sampler = TritonSampler(lambda arrays: to_cpu(arrays).to(DEVICE))
    rows = [SamplingRow(SamplingParams(max_tokens=1, seed=seed, **p), seed) for seed in range(3) for p in SAMPLING]  # type: ignore[arg-type]
    logits = 3 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab))
    logits[4, 2], logits[5, 3], logits[6] = torch.nan, torch.inf, -torch.inf
    logits[7, : vocab // 2] = -torch.inf
    logits[8] = 1.5
    logits = logits.to(DEVICE, dtype)
    chosen = sampler(logits, rows).tolist()
    assert chosen == sample_ids(logits, rows).tolist()
    assert chosen[4:7] == [-1, -1, -1]


@pytest.mark.full
def test_a_sampler_that_works_has_no_fault_and_a_broken_one_has() -> None:
    from engine.native.cuda.sampler import TritonSampler

    sampler = TritonSampler(lambda arrays: to_cpu(arrays).to(DEVICE))
    assert sampler_fault(sampler, 500, torch.bfloat16, torch.device(DEVICE)) is None
    found = sampler_fault(lambda logits, rows: sampler(logits, rows) + 1, 500, torch.bfloat16, torch.device(DEVICE))
    assert found == "it chooses other tokens in 20 of 20 rows"


@pytest.mark.parametrize(("dtype", "n"), mostly_full(product(DTYPES, (7, 64, 1500)), (torch.bfloat16, 7)))
def test_norms(layer_kernels: LayerKernels, dtype: torch.dtype, n: int) -> None:
    check_norms(layer_kernels, dtype, DEVICE, 3, n)


@pytest.mark.parametrize(("dtype", "n"), mostly_full(product(DTYPES, (37, 1100)), (torch.bfloat16, 37)))
def test_activate_and_mul(layer_kernels: LayerKernels, dtype: torch.dtype, n: int) -> None:
    check_activate_and_mul(layer_kernels, dtype, DEVICE, n)


@pytest.mark.parametrize(
    ("dtype", "rotary", "norms_of"),
    mostly_full(
        product(DTYPES, (20, 8), ("", "a head", "all heads")),
        (torch.float32, 8, "a head"),
        (torch.float32, 8, "all heads"),
        (torch.bfloat16, 20, ""),
    ),
)
def test_rotate_and_write(layer_kernels: LayerKernels, dtype: torch.dtype, rotary: int, norms_of: str) -> None:
    check_rotate_and_write(layer_kernels, dtype, DEVICE, HeadShape(4, 2, 20), rotary, norms_of)


@pytest.mark.parametrize("dtype", mostly_full((*DTYPES, torch.float16), torch.bfloat16), ids=str)
def test_rotate_and_write_fp8(layer_kernels: LayerKernels, dtype: torch.dtype) -> None:
    check_rotate_and_write(layer_kernels, dtype, DEVICE, HeadShape(4, 2, 20), 8, "a head", fp8=True)


def test_codes_of_fp8_are_torchs(layer_kernels: LayerKernels) -> None:
    """Of numbers of each size, of ties, zeros, rows that are too small for a scale, and a NaN, which its row keeps."""
    numbers = (torch.arange(-448, 448) * 2.0 ** -torch.arange(16)[:, None]).view(-1, 16)
    rows = torch.cat((numbers, torch.linspace(-448, 448, 4000).view(-1, 16))).to(DEVICE)
    rows[:, 0] = 448.0  # a scale of 1
    rows[3], rows[5, 4], rows[6] = 0.0, torch.nan, 1e-42
    values = rows.flip(0)
    slots = torch.zeros(2 * len(rows), 16, dtype=torch.uint8, device=DEVICE)
    scales, zeros = torch.zeros(len(slots), device=DEVICE), torch.zeros(len(rows), 16, device=DEVICE)
    layer_kernels.rotate_and_write(
        torch.cat((rows, rows, values), dim=1),
        HeadShape(1, 1, 16),
        slots,
        torch.arange(len(rows), device=DEVICE),
        zeros + 1,
        zeros,
        None,
        None,
        scales=scales,
    )
    codes, expected = to_fp8(torch.cat((rows, values)))
    torch.testing.assert_close(scales, expected, equal_nan=True)
    is_number = ~expected.isnan()
    assert int((~is_number).sum()) == 2
    assert torch.equal(slots[is_number], codes[is_number])


def test_what_does_not_fit_is_refused(kernels: AttentionKernels, layer_kernels: LayerKernels) -> None:
    cache = RandomCache(HeadShape(2, 1, 16), 16, NUM_BLOCKS, torch.float32, DEVICE, [20])
    with pytest.raises(ValueError, match="3 rows of queries, but 1 context lengths"):
        kernels.paged_decode(cache.query[:, :3], 1, cache.rows(), Scoring(1.0))
    with pytest.raises(ValueError, match="do not fit this cache"):
        kernels.paged_decode(cache.query[:, :1, :8], 1, cache.rows(), Scoring(1.0))
    with pytest.raises(ValueError, match="do not fit"):
        slots, row = torch.zeros(8, 8), torch.zeros(1)
        layer_kernels.rotate_and_write(torch.zeros(1, 33), HeadShape(2, 1, 8), slots, row.long(), row, row, None, None)
    assert not kernels.can_attend(HeadShape(2, 2, 512))


@pytest.mark.parametrize("fp8", [False, True], ids=("plain", "fp8"))
@pytest.mark.parametrize("dtype", mostly_full(TOLERANCES, torch.bfloat16), ids=str)
def test_the_trial_accepts_the_kernels(kernels: AttentionKernels, dtype: torch.dtype, fp8: bool) -> None:
    specs = [LayerSpec(LayerShape(2, 24), window) for window in (None, 9)]
    assert find_fault(kernels, specs, 4, dtype, torch.device(DEVICE), fp8=fp8) is None


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="test_on_gpu.py has them on the GPU")
@pytest.mark.parametrize(("name", "has_graphs"), [("llama", False), ("gemma2", True)])
def test_an_engine_with_the_kernels_gives_the_tokens_of_generate(
    name: str, has_graphs: bool, kernels: AttentionKernels, make_engine: MakeEngine, model_directory: ModelDirectory
) -> None:
    plain = make_engine(name, optimize=False)
    engine = (
        with_graphs(plain, [GraphSize(3), GraphSize(1), GraphSize(2, 6)], kernels)[0]
        if has_graphs
        else with_kernels(plain, kernels)
    )
    rng = random.Random(3)
    prompts = {f"s{i}": tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(n)) for i, n in enumerate((12, 3, 1))}
    news = [make_new(seq_id, prompt, max_tokens=3) for seq_id, prompt in prompts.items()]
    driven = drive(engine, news, random_chunks(rng, 9), arrivals_a_step=2)
    expected = {seq_id: generate(model_directory(name)[1], prompt, 3) for seq_id, prompt in prompts.items()}
    assert {seq_id: tuple(d.output) for seq_id, d in driven.items()} == expected
    assert engine._runner.attention.in_kernels


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="test_on_gpu.py has them on the GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_layers_give_the_tokens_of_generate(
    name: str,
    kernels: AttentionKernels,
    layer_kernels: LayerKernels,
    make_engine: MakeEngine,
    model_directory: ModelDirectory,
) -> None:
    engine = with_kernels(make_engine(name, optimize=False), kernels)
    runner = engine._runner
    assert fuse_with_kernels(runner._model, runner, layer_kernels, engine.info) == 2
    prompts = {"a": (5, 6, 7, 8, 9, 10), "b": (3,)}
    driven = drive(engine, [make_new(seq_id, prompt, max_tokens=3) for seq_id, prompt in prompts.items()])
    expected = {seq_id: generate(model_directory(name)[1], prompt, 3) for seq_id, prompt in prompts.items()}
    assert {seq_id: tuple(d.output) for seq_id, d in driven.items()} == expected


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="test_on_gpu.py has them on the GPU")
@pytest.mark.parametrize("is_fused", [False, True], ids=("attention", "fused layers and graphs"))
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_fp8_engine_with_the_kernels_computes_what_torchs_operators_do(
    name: str, is_fused: bool, kernels: AttentionKernels, layer_kernels: LayerKernels, make_engine: MakeEngine
) -> None:
    """And not what it computes with keys and values in float32, or the test would pass without FP8."""
    prompts = {"a": tuple(range(3, 22)), "b": (5, 9, 2), "c": (7,)}
    news = [make_new(k, p, max_tokens=6, logprobs=1) for k, p in prompts.items()]

    def logprobs(engine: TorchEngine) -> list[Any]:
        reported = Reported()
        drive(engine, news, random_chunks(random.Random(3), 9), arrivals_a_step=2, after_step=reported)
        return sum((reported.output[k] for k in prompts), [])

    plain, expected = (make_engine(name, optimize=False, kv_cache_dtype="fp8") for _ in range(2))
    sizes = [GraphSize(3), GraphSize(1), GraphSize(2, 6)]
    layers = layer_kernels if name == "llama" else None
    engine = with_graphs(plain, sizes, kernels, layers=layers)[0] if is_fused else with_kernels(plain, kernels)
    right = logprobs(expected)
    assert_alike(logprobs(engine), right)
    assert engine._runner.attention.in_kernels
    with pytest.raises(AssertionError):
        assert_alike(logprobs(make_engine(name, optimize=False)), right)


@pytest.mark.parametrize("rows", mostly_full([1, 16, 33, 64, 65], 33))
@pytest.mark.parametrize("dtype", mostly_full(DTYPES, torch.float32))
def test_quantised_products(dtype: torch.dtype, rows: int) -> None:
    from engine.native.cuda.quantized_linear import KernelLinear, quantized_fault

    assert quantized_fault(dtype, torch.device(DEVICE)) is None
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(40, 150, generator=generator), torch.randn(184, generator=generator)
    sixteen = torch.randint(0, 256, (64, 10, 16), dtype=torch.uint8, generator=generator)
    symmetric = torch.randint(0, 16, (40, 5, 32), dtype=torch.uint8, generator=generator)
    scales = torch.rand(64, 10, generator=generator) * 0.01
    parts = [
        rounded(weight, 8),
        rounded(weight, 4),
        GroupedWeight.of(sixteen, scales, None, 8, 150),
        GroupedWeight.of(symmetric, scales[:40, :5], None, 4, 150),
    ]
    layer = KernelLinear(parts, bias.to(dtype), dtype).to(DEVICE)
    x = torch.randn(1, rows, 150, generator=generator).to(DEVICE, dtype)
    x[0, 0, 3] = float("nan")
    with torch.inference_mode():
        actual, expected = layer(x), QuantizedLinear.forward(layer, x)
    assert actual[0, 0].isnan().all()
    bound = 1e-4 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(actual[0, 1:], expected[0, 1:], atol=20 * bound, rtol=bound)


def test_a_quantised_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.native.cuda import quantized_linear

    monkeypatch.setattr(quantized_linear.KernelLinear, "forward", lambda self, x: 2 * QuantizedLinear.forward(self, x))
    assert quantized_linear.quantized_fault(torch.float32, torch.device(DEVICE)) == (
        "quantised products differ by 1.000 from their definition"
    )


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="test_on_gpu.py has it on the GPU")
def test_a_quantised_engine_with_the_kernel_gives_the_tokens_of_the_definition(
    make_engine: MakeEngine, layer_kernels: LayerKernels, kernels: AttentionKernels
) -> None:
    from engine.native.cuda.quantized_linear import KernelLinear
    from engine.native.startup.cuda_bring_up import _join

    plain = make_engine("llama", optimize=False, quantize="int8")
    prompts = {"a": tuple(range(3, 22)), "b": (5, 9, 2)}
    news = [make_new(k, p, max_tokens=6) for k, p in prompts.items()]
    expected = {k: d.output for k, d in drive(plain, news).items()}
    engine = with_kernels(make_engine("llama", optimize=False, quantize="int8"), kernels)
    runner = engine._runner
    join = _join(runner._model, torch.float32, torch.device(DEVICE))
    assert fuse_with_kernels(runner._model, runner, layer_kernels, engine.info, join) == 2
    assert sum(isinstance(module, KernelLinear) for module in runner._model.modules()) == 2 * 4 + 1
    assert {k: d.output for k, d in drive(engine, news).items()} == expected
