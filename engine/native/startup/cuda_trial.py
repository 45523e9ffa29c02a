"""Compare kernels of attention and sampling with torch's operators on this device, before the engine uses them.

Knows small steps and two ways to compute each; does not know what the engine does with the result.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.interface import SamplingParams
from engine.native.attention.kernels import AttentionKernels
from engine.native.attention.paged import PagedAttention
from engine.native.batch.packing import DecodeGroup, PrefillChunk, StepBatch
from engine.native.batch.tensors import StepTensors, to_cpu, upload_step
from engine.native.kv.cache import KVCache, LayerShape
from engine.native.startup.probe import LayerSpec
from engine.sampling.sampler import DeviceSampler, SamplingRow, sample_ids

_BLOCK_SIZE = 16  # tokens
_WINDOW = 9  # tokens
# Tokens in the context of each decode row. The first is long enough to be computed in several splits, which are merged.
_CONTEXTS = (700, 40, 7)
_CHUNK = (150, 220)  # position of the prefill chunk's first token, and of the token after its last
_NUM_BLOCKS = sum(-(-length // _BLOCK_SIZE) for length in (*_CONTEXTS, _CHUNK[1]))
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
)
# Largest allowed difference from the results of torch's operators, by dtype. The results are about 1.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@torch.inference_mode()
def find_fault(
    kernels: AttentionKernels,
    specs: Sequence[LayerSpec],
    num_query_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
) -> str | None:
    """Return a text that says for which layers `kernels` are wrong; None if they are right for all layers.

    Exceptions of the kernels pass through.
    """
    for shape, has_window in dict.fromkeys((spec.shape, spec.window is not None) for spec in specs):
        error = _error(kernels, shape, _WINDOW if has_window else None, num_query_heads, dtype, device, fp8=fp8)
        if not error <= _TOLERANCES[dtype]:
            return f"they are {error:.2g} off for KV heads of {shape.head_dim}{', with a window' * has_window}"
    return None


@torch.inference_mode()
def sampler_fault(sampler: DeviceSampler, vocab_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a text that says how `sampler` differs from torch's operators; None if it does not.

    Sums round in another order, which can move a row's number to the next token: one row may differ.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [SamplingRow(SamplingParams(max_tokens=1, seed=seed, **p), seed) for seed in range(4) for p in _SAMPLED]
    logits = 3 * torch.randn(len(rows), vocab_size, generator=generator)
    logits[0, -1] = torch.nan
    logits = logits.to(device, dtype)
    num_wrong = int((sampler(logits, rows) != sample_ids(logits, rows)).sum())
    return f"it chooses other tokens in {num_wrong} of {len(rows)} rows" if num_wrong > 1 else None


def _error(
    kernels: AttentionKernels,
    shape: LayerShape,
    window: int | None,
    num_query_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
) -> float:
    """Return the largest absolute difference from torch's operators, on a layer of random keys and values."""
    cache = KVCache([shape], _NUM_BLOCKS, _BLOCK_SIZE, dtype, device, fp8=fp8)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(cache.layers[0].slots.shape, generator=generator).to(device, dtype)
    key, value = rows.view(2, 1, shape.num_kv_heads, -1, shape.head_dim)
    cache.layers[0].write(key, value, torch.arange(len(rows), device=device))
    step = _trial_step(device)
    heads = max(1, num_query_heads // shape.num_kv_heads) * shape.num_kv_heads
    size = (heads, step.token_ids.shape[1], shape.head_dim)
    query = torch.randn(size, generator=generator).to(device, dtype)
    unused = query[: shape.num_kv_heads]  # the chunk does not begin at 0, so keys and values come from the cache
    attended = []
    for way in (kernels, None):
        attention = PagedAttention(cache, [window], way)
        attention.begin(step)
        attended.append(attention.attend(0, query, unused, unused, shape.head_dim**-0.5).float())
    return float((attended[0] - attended[1]).abs().max())


def _trial_step(device: torch.device) -> StepTensors:
    """Return a step of decode rows and one prefill chunk. The KV blocks of its sequences are not in order."""
    order = np.random.default_rng(0).permutation(_NUM_BLOCKS)
    counts = [-(-length // _BLOCK_SIZE) for length in (*_CONTEXTS, _CHUNK[1])]
    *decoded, prefilled = np.split(order, np.cumsum(counts)[:-1])
    tables = np.stack([np.pad(table, (0, counts[0] - len(table)), mode="edge") for table in decoded])
    contexts = np.array(_CONTEXTS)
    start, end = _CHUNK
    num_rows = len(contexts) + end - start
    zeros = np.zeros(num_rows, dtype=np.int64)
    batch = StepBatch(
        token_ids=zeros,
        positions=zeros,
        slot_ids=zeros,
        logit_rows=zeros[:0],
        sampled_chunks=(),
        decode_groups=(DecodeGroup(0, len(contexts), tables, contexts),),
        prefill_chunks=(PrefillChunk(len(contexts), start, end, prefilled),),
    )
    upload = upload_step(batch, _NUM_BLOCKS, _BLOCK_SIZE, lambda arrays: to_cpu(arrays).to(device))
    return upload.step
