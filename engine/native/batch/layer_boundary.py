"""Between two layers of a forward pass: sequences may leave it there, and the rest goes on with fewer rows.

Knows rows and tensors; not who leaves or why (`shedding`). What the model's own code holds stays as long as it was: the
rows that go on move to the beginning of the residual stream, and those behind them are looked at by nobody.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.batch.eviction import RemainingRows
from engine.native.batch.packing import StepBatch
from engine.native.batch.tensors import StepTensors, UploadedStep

Evict = Callable[[], RemainingRows | None]


class LayerBoundary:
    """Of one forward pass over `batch`. `wanted_rows`: the tensor that tells the model whose logits are wanted. Behind
    its last layer it looks there, and finds what is wanted by then."""

    def __init__(
        self, batch: StepBatch, wanted_rows: Tensor, evict: Evict, upload: Callable[[StepBatch], UploadedStep]
    ) -> None:
        self.batch = batch  # what is still in the pass
        self._wanted_rows = wanted_rows
        self._let_go = evict
        self._upload = upload

    def __call__(self, step: StepTensors) -> tuple[StepTensors, Tensor] | None:
        """The step that goes on, and the rows of `step` that it is; None: nobody leaves. Raises `StepEvicted`."""
        departure = self._let_go()
        if departure is None:
            return None
        had_wanted, self.batch = len(self.batch.sampled_rows) > 0, departure.batch
        uploaded = self._upload(departure.batch)
        if had_wanted:
            wanted = uploaded.sampled_rows
            if not len(wanted):  # some row, of which nobody wants to know
                wanted = torch.zeros_like(self._wanted_rows[:1])
            self._wanted_rows.resize_(len(wanted)).copy_(wanted)
        staying = torch.from_numpy(departure.rows).to(step.slots.device)
        uploaded.step.origin = staying if step.origin is None else step.origin[staying]
        return uploaded.step, staying


def compact_rows(stream: Tensor, staying: Tensor) -> None:
    """The rows that go on come first, in place; (T, hidden)."""
    stream[: len(staying)] = stream[staying]
