"""The layers' Triton kernels compared with transformers' arithmetic; `test_triton.py` says where they run."""

from itertools import product

import pytest
import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape
from engine.native.model.layer_kernels import LayerKernels, Norm
from engine.native.startup.cuda_bring_up import fuse_with_kernels
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new
from tests.engine.models import generate
from tests.engine.native.cuda.rebuilt import with_kernels
from tests.engine.native.cuda.test_triton import DEVICE, HAS_GPU, IS_INTERPRETED
from tests.engine.native.reference import rms_norm, rotate
from tests.marks import mostly_full

pytestmark = [
    pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="no GPU, and not in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

DTYPES = (torch.float32, torch.bfloat16)
NUM_SLOTS = 60


@pytest.fixture
def kernels() -> LayerKernels:
    from engine.native.cuda.layers import TritonLayerKernels

    return TritonLayerKernels()


def randn(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype is torch.float32 else 0.02
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "n"), mostly_full(product(DTYPES, (7, 64, 1500)), (torch.bfloat16, 7)))
def test_norms(kernels: LayerKernels, dtype: torch.dtype, n: int) -> None:
    norm = Norm(randn(n, dtype=dtype), 1e-5)
    x, residual = randn(3, n, dtype=dtype) * 5, randn(3, n, dtype=dtype)
    assert_close(kernels.rms_norm(x, norm), rms_norm(x, norm))
    total = x + residual
    assert_close(kernels.add_rms_norm(residual, x, norm), rms_norm(total, norm))
    assert_close(residual, total)


@pytest.mark.parametrize(("dtype", "n"), mostly_full(product(DTYPES, (37, 1100)), (torch.bfloat16, 37)))
def test_silu_and_mul(kernels: LayerKernels, dtype: torch.dtype, n: int) -> None:
    gate_up = randn(3, 2 * n, dtype=dtype) * 5
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(kernels.silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("dtype", "rotary", "with_norms"),
    mostly_full(product(DTYPES, (20, 8), (False, True)), (torch.float32, 8, True), (torch.bfloat16, 20, False)),
)
def test_rotate_and_write(kernels: LayerKernels, dtype: torch.dtype, rotary: int, with_norms: bool) -> None:
    shape, rows = HeadShape(4, 2, 20), 3
    qkv = randn(rows, shape.query_width + 2 * shape.kv_width, dtype=dtype)
    slots = torch.zeros(2 * shape.num_kv_heads * NUM_SLOTS, shape.head_dim, dtype=dtype, device=DEVICE)
    slot_ids = torch.tensor([9, 59, 0], device=DEVICE)
    angles = randn(rows, rotary // 2, dtype=torch.float32).repeat(1, 2) * 3
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = [Norm(randn(size, dtype=dtype)[:20].contiguous(), 1e-6) if with_norms else None for size in (20, 21)]
    heads = qkv.clone().unflatten(1, (-1, shape.head_dim))
    queries, keys = (rotate(h, n, cosines, sines) for h, n in zip((heads[:, :4], heads[:, 4:6]), norms, strict=True))
    expected = torch.cat((queries, keys, heads[:, 6:]), dim=1)
    kernels.rotate_and_write(qkv, shape, slots, slot_ids, cosines, sines, *norms)
    assert_close(qkv, expected.flatten(1))
    written = slots.view(2, shape.num_kv_heads, -1, shape.head_dim)[:, :, slot_ids]
    assert_close(written, torch.stack((keys, heads[:, 6:])).transpose(1, 2))
    assert int((slots != 0).any(-1).sum()) == rows * 2 * shape.num_kv_heads  # and nowhere else
    with pytest.raises(ValueError, match="do not fit"):
        kernels.rotate_and_write(qkv[:, :-1], shape, slots, slot_ids, cosines, sines, *norms)


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="test_cuda.py has them on the GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_layers_give_the_tokens_of_generate(
    name: str, kernels: LayerKernels, make_engine: MakeEngine, model_directory: ModelDirectory
) -> None:
    from engine.native.cuda.kernels import TritonKernels

    engine = with_kernels(make_engine(name, optimize=False), TritonKernels(num_processors=1))
    runner = engine._runner
    assert fuse_with_kernels(runner._model, runner, kernels, engine.info) == 2
    prompts = {"a": (5, 6, 7, 8, 9, 10), "b": (3,)}
    driven = drive(engine, [make_new(seq_id, prompt, max_tokens=3) for seq_id, prompt in prompts.items()])
    expected = {seq_id: generate(model_directory(name)[1], prompt, 3) for seq_id, prompt in prompts.items()}
    assert {seq_id: tuple(d.output) for seq_id, d in driven.items()} == expected
