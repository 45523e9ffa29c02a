"""Runs one forward pass over a packed step.

Knows the model, its KV cache and the device; does not know sequences or sampling.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from engine.native.attention.kernels import AttentionKernels
from engine.native.attention.paged import PagedAttention, bind
from engine.native.batch.packing import StepBatch, in_one_group
from engine.native.batch.sampled_tokens import fill_in, moment_on
from engine.native.batch.tensors import StepTensors, Upload, UploadedStep, decodes_to_chunks, to_cpu, upload_step
from engine.native.cuda.pinned_ring import PinnedRing
from engine.native.cuda.step_graphs import StepGraphs
from engine.native.kv.cache import KVCache
from engine.native.model.loader import forward


class ModelRunner:
    """A model with its paged attention, ready to run steps.

    `windows` holds, for each layer, the number of tokens that a row attends to; None: all tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        windows: list[int | None],
        device: torch.device,
        kernels: AttentionKernels | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self.attention = PagedAttention(cache, windows, kernels)
        bind(model, self.attention)
        self._kernels = kernels
        self._upload: Upload = PinnedRing(device).upload if device.type == "cuda" else to_cpu
        self._graphs: StepGraphs | None = None
        self.is_exact = False  # True: decodes attend as prefills do, with the same rounding; needs kernels for prefills
        self.operators: object = None  # keeps alive what replaces operators of torch
        self.between_layers: Callable[[], None] | None = None  # called before each layer of a pass without a graph
        self._first_row = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self._cache.dtype

    @property
    def no_ids(self) -> Tensor:
        """The token ids (0,) of a step that samples nothing."""
        return self._first_row[:0]

    @property
    def num_layers(self) -> int:
        return len(self._cache.layers)

    def moment(self) -> torch.cuda.Event | None:
        """Return the moment at which the device will have done the work that it has been given; None on a CPU."""
        return moment_on(self._device) if self._device.type == "cuda" else None

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Use `graphs` from now on for the steps that they support."""
        self._graphs = graphs

    def decode_replay(self, rows: int) -> Callable[[], None] | None:
        """Return a function that repeats the newest decode step of `rows` rows; None if no graph has that many."""
        return None if self._graphs is None else self._graphs.decode_replay(rows)

    @torch.inference_mode()
    def run(self, batch: StepBatch, previous: Tensor | None = None) -> Tensor | None:
        """Write the keys and values of the batch, and return the logits of its sampled rows, (rows, vocab).

        The logits are valid until the next run. Return None if the batch has no sampled rows.

        `previous` are the sampled ids of the previous step; they replace placeholders among the batch's tokens.
        """
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            size = None if self._graphs is None else self._graphs.fitting_size(batch)
            if self._graphs is None or size is None:
                return self._run_eagerly(batch, previous)
            return self._graphs.run(batch, size, previous)

    def _run_eagerly(self, batch: StepBatch, previous: Tensor | None) -> Tensor | None:
        uploaded = self._uploaded(batch)
        if batch.unfilled_blocks and not self.attention.in_kernels:
            # Torch's operators read slots that are not written yet, and mask them. But if a former holder of the block
            # has left a NaN in a slot, the mask does not remove the NaN. Kernels do not read these slots.
            self._cache.clear(uploaded.unfilled_blocks)
        if previous is not None:
            uploaded.step.token_ids = fill_in(uploaded.step.token_ids, previous)
        rows = uploaded.logit_rows if len(batch.logit_rows) else self._first_row
        logits = self.compute(uploaded.step, rows)
        return logits if len(batch.logit_rows) else None

    def _uploaded(self, batch: StepBatch) -> UploadedStep:
        if self._kernels is not None:
            batch = in_one_group(batch)
        return upload_step(batch, self._cache.num_blocks, self._cache.block_size, self._upload)

    def compute(self, step: StepTensors, rows: Tensor) -> Tensor:
        """Write the keys and values of the step, and return the logits of `rows`, (rows, vocab)."""
        if self.is_exact:
            decodes_to_chunks(step)
        self.attention.begin(step, self.between_layers)
        return forward(self._model, step.token_ids, step.positions, rows)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def release_memory(self) -> None:
        """Release the memory that torch keeps for later allocations. This also removes its fragmentation."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
