"""The boundary between two layers of a forward pass, at which sequences are evicted.

After an eviction, the pass continues with fewer rows. Tensors that the model's own code holds keep their length: the
remaining rows move to the start of the residual stream, and the rows after them are unused. Knows rows and tensors;
does not know which sequences are evicted or why (`RunningChunks`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.batch.eviction import RemainingRows
from engine.native.batch.packing import StepBatch
from engine.native.batch.tensors import StepTensors, UploadedStep

Evict = Callable[[], RemainingRows | None]


class LayerBoundary:
    """The boundaries of one forward pass over `batch`; the pass calls this object before each layer.

    `wanted_rows` holds the numbers of the rows whose logits are wanted. The model reads this tensor after its last
    layer, so an eviction resizes it in place.
    """

    def __init__(
        self, batch: StepBatch, wanted_rows: Tensor, evict: Evict, upload: Callable[[StepBatch], UploadedStep]
    ) -> None:
        self.batch = batch  # the batch that remains in the pass
        self._wanted_rows = wanted_rows
        self._evict = evict
        self._upload = upload

    def __call__(self, step: StepTensors) -> tuple[StepTensors, Tensor] | None:
        """Evict the requested sequences. Return the remaining step and the row numbers that its rows have in `step`.

        Return None if no row was evicted. Raises `StepEvicted` if no sequence remains.
        """
        remaining = self._evict()
        if remaining is None:
            return None
        had_wanted, self.batch = len(self.batch.sampled_rows) > 0, remaining.batch
        uploaded = self._upload(remaining.batch)
        if had_wanted:
            wanted = uploaded.sampled_rows
            if not len(wanted):  # the model must compute the logits of some row; the caller ignores them
                wanted = torch.zeros_like(self._wanted_rows[:1])
            self._wanted_rows.resize_(len(wanted)).copy_(wanted)
        rows = torch.from_numpy(remaining.rows).to(step.slots.device)
        uploaded.step.origin = rows if step.origin is None else step.origin[rows]
        return uploaded.step, rows


def compact_rows(stream: Tensor, rows: Tensor) -> None:
    """Move some rows of `stream`, (T, hidden), to its start, in place. `rows` holds the numbers of these rows."""
    stream[: len(rows)] = stream[rows]
