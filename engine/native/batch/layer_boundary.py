"""The boundary between two layers of a forward pass, at which sequences are evicted.

After an eviction, the pass continues with fewer rows. Tensors that the model's own code holds keep their length: the
remaining rows move to the start of the residual stream, and the rows after them are unused. Knows rows and tensors;
does not know which sequences are evicted or why (`RunningChunks`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.batch.eviction import RunningChunks
from engine.native.batch.packing import StepBatch
from engine.native.batch.tensors import StepTensors, UploadedStep


class LayerBoundary:
    """The boundaries of one forward pass over `running`; the pass calls this object before each layer.

    `logit_rows` holds the numbers of the rows whose logits are wanted. The model reads this tensor after its last
    layer, so an eviction resizes it in place. `wait_for_device` is called before each look at the requested evictions:
    the host may be many layers ahead of the device, and an eviction saves only layers that were not launched yet.
    """

    def __init__(
        self,
        running: RunningChunks,
        logit_rows: Tensor,
        upload: Callable[[StepBatch], UploadedStep],
        wait_for_device: Callable[[], None] | None = None,
    ) -> None:
        self._running = running
        self._logit_rows = logit_rows
        self._upload = upload
        self._wait_for_device = wait_for_device

    def __call__(self, step: StepTensors) -> tuple[StepTensors, Tensor] | None:
        """Evict the requested sequences. Return the remaining step and the row numbers that its rows have in `step`.

        Return None if no row was evicted. Raises `StepEvicted` if no sequence remains.
        """
        if self._wait_for_device is not None:
            self._wait_for_device()
        had_wanted = len(self._running.batch.logit_rows) > 0
        remaining = self._running.evict()
        if remaining is None:
            return None
        uploaded = self._upload(self._running.batch)
        if had_wanted:
            wanted = uploaded.logit_rows
            if not len(wanted):  # the model must compute the logits of some row; the caller ignores them
                wanted = torch.zeros_like(self._logit_rows[:1])
            self._logit_rows.resize_(len(wanted)).copy_(wanted)
        rows = torch.from_numpy(remaining).to(step.slot_ids.device)
        uploaded.step.origin = rows if step.origin is None else step.origin[rows]
        return uploaded.step, rows


def compact_rows(stream: Tensor, rows: Tensor) -> None:
    """Move some rows of `stream`, (T, hidden), to its start, in place. `rows` holds the numbers of these rows."""
    stream[: len(rows)] = stream[rows]
