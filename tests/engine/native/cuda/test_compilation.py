"""The Triton kernels compile to machine code for Hopper GPUs (sm_90); this needs no GPU.

It finds code that only the interpreter accepts, and checks how much shared memory a kernel takes.
"""

import importlib.util
import os
import re
from typing import Any

import pytest

from engine.native.model.layer_kernels import Activation
from tests.marks import mostly_full

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

SHARED_BYTES = 227 << 10  # shared memory of a streaming multiprocessor on sm_90
HEADS = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "PADDED_DIM": 128, "GROUP": 4, "KV_HEADS": 8, "TILE": 64, "IS_FP8": False}
# Types of the arguments that are not pointers to numbers of the model's dtype.
KINDS = {
    **dict.fromkeys(("block_table", "block_tables", "context_lens", "extents", "slot_ids"), "*i64"),
    **dict.fromkeys(("partial", "partial_state", "sinks", "rules", "weight", "query_weight", "key_weight"), "*fp32"),
    **dict.fromkeys(("scaling", "softcap", "eps", "query_eps", "key_eps"), "fp32"),
    "codes": "*i8",
    "scales": "*fp32",
    **dict.fromkeys(("vocab", "num_rows"), "i32"),
    **dict.fromkeys(("window", "num_slots", "row_stride", "head_stride", "table_stride", "num_splits"), "i32"),
}


def compile_for_sm90(
    kernel: Any,
    element: str,
    num_warps: int,
    constants: dict[str, Any],
    num_stages: int = 3,
    capability: int = 90,
    *,
    fp8: bool = False,
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = {**KINDS, "slots": "*u8"} if fp8 else KINDS
    kinds = {name: "constexpr" if name in constants else types.get(name, f"*{element}") for name in kernel.arg_names}
    # Large tensors are aligned to 16 bytes.
    large = (f"*{element}", "*u8")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind in large}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("element", mostly_full(["bf16", "fp32"], "bf16"))
def test_decode(element: str) -> None:
    from engine.native.cuda import triton_kernels as kernels
    from engine.native.cuda.kernels import DECODE_STAGES

    dot_dtype = kernels.tl.bfloat16 if element == "bf16" else kernels.tl.float32
    flags = {"HAS_SOFTCAP": True, "HAS_WINDOW": True, "HAS_SINKS": True}
    tile = {"TILE": 64 if element == "bf16" else 32}
    split = {**HEADS, **flags, **tile, "PADDED_GROUP": 16, "MIN_SPLIT": 128, "DOT_DTYPE": dot_dtype}
    compiled = compile_for_sm90(kernels.decode_split_kernel, element, 4, split, DECODE_STAGES)
    assert 0 < compiled.metadata.shared <= SHARED_BYTES // 3  # three programs at once
    if element == "bf16":  # the loop waits for the older tile while the newer one is loaded
        assert {"1", "3"} <= set(re.findall(r"cp.async.wait_group\s+(\d+)", compiled.asm["ptx"]))
    merge = {"HEADS": 32, "HEAD_DIM": 128, "PADDED_DIM": 128, "MAX_SPLITS": 32, "MIN_SPLIT": 128, **tile}
    merge |= {"HAS_WINDOW": True, "HAS_SINKS": True}
    assert compile_for_sm90(kernels.decode_merge_kernel, element, 4, merge).asm["cubin"]


def test_prefill() -> None:
    from engine.native.cuda import triton_kernels as kernels

    constants = {**HEADS, "TOKENS": 16, "ROWS": 64, "HAS_SOFTCAP": False, "HAS_WINDOW": False, "HAS_SINKS": True}
    constants["DOT_DTYPE"] = kernels.tl.bfloat16
    compiled = compile_for_sm90(kernels.prefill_kernel, "bf16", 4, constants)
    assert 0 < compiled.metadata.shared <= SHARED_BYTES // 2
    assert "wgmma" in compiled.asm["ptx"]  # Hopper's products of whole tiles


def test_layers() -> None:
    from engine.native.cuda import triton_layers as kernels

    norm = {"N": 4096, "PADDED_N": 4096, "HAS_RESIDUAL": True, "ROUNDS": True}
    assert compile_for_sm90(kernels.rms_norm_kernel, "bf16", 8, norm).asm["cubin"]
    for activation in Activation:
        constants = {"N": 14336, "TILE": 1024, "ACTIVATION": int(activation)}
        assert compile_for_sm90(kernels.activate_and_mul_kernel, "bf16", 4, constants).asm["cubin"]
    rotate = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PADDED_DIM": 128, "ROTARY": 128, "TILE": 8}
    rotate |= {"HAS_QUERY_NORM": True, "HAS_KEY_NORM": False, "ROUNDS": True, "IS_FP8": False}
    for in_pairs in (False, True):
        constants = {**rotate, "IN_PAIRS": in_pairs}
        assert compile_for_sm90(kernels.rotate_and_write_kernel, "bf16", 4, constants).asm["cubin"]


@pytest.mark.parametrize(
    ("capability", "shared_kib"), mostly_full([(80, 163), (89, 99), (90, 227), (100, 227)], (89, 99))
)
@pytest.mark.parametrize("element", mostly_full(["bf16", "fp16", "fp32"], "bf16"))
def test_fp8(element: str, capability: int, shared_kib: int) -> None:
    """For GPUs with and without instructions for FP8: the kernels need none."""
    from engine.native.cuda import triton_kernels as kernels
    from engine.native.cuda.kernels import DECODE_STAGES
    from engine.native.cuda.triton_layers import rotate_and_write_kernel

    dot_dtype = {"bf16": kernels.tl.bfloat16, "fp16": kernels.tl.float16, "fp32": kernels.tl.float32}[element]
    keys, on = 32 if element == "fp32" else 64, {"capability": capability, "fp8": True}
    heads = {**HEADS, "TILE": keys, "IS_FP8": True, "DOT_DTYPE": dot_dtype}
    heads |= {"HAS_SOFTCAP": True, "HAS_WINDOW": True, "HAS_SINKS": True}
    split = {**heads, "PADDED_GROUP": 16, "MIN_SPLIT": 128}
    compiled = compile_for_sm90(kernels.decode_split_kernel, element, 4, split, DECODE_STAGES, **on)
    assert 0 < compiled.metadata.shared <= shared_kib << 10
    for has_window in (True, False):
        prefill = {**heads, "HAS_WINDOW": has_window, "TOKENS": keys // 4, "ROWS": keys}
        compiled = compile_for_sm90(kernels.prefill_kernel, element, 4, prefill, **on)
        assert 0 < compiled.metadata.shared <= shared_kib << 10
    rotate = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PADDED_DIM": 128, "ROTARY": 128, "TILE": 8}
    rotate |= {"HAS_QUERY_NORM": True, "HAS_KEY_NORM": False, "ROUNDS": True, "IN_PAIRS": False, "IS_FP8": True}
    assert compile_for_sm90(rotate_and_write_kernel, element, 4, rotate, **on).asm["cubin"]


@pytest.mark.parametrize(("bits", "group", "has_offsets"), [(8, 32, False), (8, 16, False), (4, 32, True)])
def test_quantised_products(bits: int, group: int, has_offsets: bool) -> None:
    from engine.native.cuda import triton_products as kernels

    constants = {"OUT": 4096, "IN": 4096, "STRIDE": 8192, "HAS_BIAS": True, "ROWS": 16, "OUTPUTS": 32, "INPUTS": 128}
    constants |= {"GROUPS": 4096 // group, "GROUP": group, "BITS": bits, "HAS_OFFSETS": has_offsets}
    constants["DOT_DTYPE"] = kernels.tl.bfloat16
    compiled = compile_for_sm90(kernels.quantized_product_kernel, "bf16", 4, constants)
    assert 0 < compiled.metadata.shared <= SHARED_BYTES // 3


@pytest.mark.parametrize(("capability", "shared_kib"), mostly_full([(80, 163), (90, 227), (100, 227)], (90, 227)))
@pytest.mark.parametrize("element", mostly_full(["bf16", "fp32"], "bf16"))
def test_exact_operators(element: str, capability: int, shared_kib: int) -> None:
    from engine.native.cuda import exact_operators, triton_kernels, triton_products

    tile = exact_operators.TILE if element == "bf16" else exact_operators.TILE_FLOAT32
    dot_dtype = {"DOT_DTYPE": triton_kernels.tl.bfloat16 if element == "bf16" else triton_kernels.tl.float32}
    product = {"OUT": 4096, "IN": 4096, "OUT_STRIDE": 4096, "IN_STRIDE": 1, "HAS_BIAS": True, **tile, **dot_dtype}
    stages = exact_operators.STAGES
    compiled = compile_for_sm90(triton_products.product_kernel, element, 4, product, stages, capability)
    assert 0 < compiled.metadata.shared <= shared_kib << 9  # two programs at once
    mean = {"N": 4096, "PADDED_N": 4096}
    assert compile_for_sm90(triton_products.mean_kernel, "fp32", 4, mean, capability=capability).asm["cubin"]
    keys = 64 if element == "bf16" else 32
    attention = {**HEADS, "TILE": keys, "TOKENS": keys // 4, "ROWS": keys, "HAS_SOFTCAP": False, "HAS_SINKS": False}
    attention |= {"HAS_WINDOW": True, **dot_dtype}  # with a window, all tiles are computed by one loop
    compiled = compile_for_sm90(triton_kernels.prefill_kernel, element, 4, attention, capability=capability)
    assert 0 < compiled.metadata.shared <= shared_kib << 9
    assert len(exponents(compiled.asm["ptx"])) == 1
    attention["HAS_WINDOW"] = False  # a key's weight then depends on the loop, and so on the rows beside its row
    compiled = compile_for_sm90(triton_kernels.prefill_kernel, element, 4, attention, capability=capability)
    assert exponents(compiled.asm["ptx"]) == {"fma.rn.f32", "sub.f32"}


def exponents(ptx: str) -> set[str]:
    """Return the instructions that compute the operands of `ex2`."""
    written = re.findall(r"^\s*(?:@%p\d+ +)?([a-z][\w.]+)\s+(%\w+), *(%?\w+)", ptx, re.MULTILINE)
    made, found = dict[str, str](), set[str]()
    for name, target, operand in written:
        if name.startswith("ex2"):
            found.add(made[operand])
        made[target] = name
    return found


@pytest.mark.parametrize(("element", "shift"), mostly_full([("bf16", 16), ("fp16", 13), ("fp32", 0)], ("bf16", 16)))
def test_sampling(element: str, shift: int) -> None:
    from engine.native.cuda import triton_sampling as kernels

    compiled = compile_for_sm90(kernels.sample_kernel, element, 8, {"SHIFT": shift, "TILE": 4096})
    assert compiled.asm["cubin"]
    assert "ld.local" not in compiled.asm["ptx"]  # nothing is spilled
