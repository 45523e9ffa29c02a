"""One forward pass over a packed step. Knows the model, its KV cache and device; not sequences' fates, not
sampling."""

import torch
from torch import Tensor, nn

from engine.kv_cache import KVCache
from engine.model_loader import forward
from engine.paged_attention import PagedAttention, bind
from engine.step_batch import StepBatch
from engine.step_tensors import StepTensors


class ModelRunner:
    def __init__(self, model: nn.Module, cache: KVCache, windows: list[int | None], device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._attention = PagedAttention(cache, windows)
        bind(model, self._attention)
        self._first_row = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor | None:
        """Write the batch's keys and values; logits of its sampled rows, (rows, vocab), if it has any."""
        step = StepTensors(batch, self._cache.num_blocks, self._cache.block_size, self._device)
        if batch.unfilled_blocks:
            # Slots not yet written are read, and masked; but a NaN that a former owner left there would stay
            # NaN under any mask.
            self._cache.clear(step.unfilled_blocks)
        self._attention.begin(step)
        rows = step.sampled_rows if batch.sampled_chunks else self._first_row
        logits = forward(self._model, step.token_ids, step.positions, rows)
        return logits if batch.sampled_chunks else None

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
