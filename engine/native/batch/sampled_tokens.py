"""Token ids that a step has sampled: on the device, and being copied to the host while the device goes on.

With async scheduling the next step reads them on the device. A row of that step whose token the host does not know yet
holds a placeholder: the number of the row that sampled it. Knows ids and their copy; not the sequences.
"""

import torch
from torch import Tensor


class SampledTokens:
    """`ids`: (rows,) on the device; below 0 for a row with broken logits."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._host, self._event = ids, None
        if ids.device.type == "cuda":
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            # Recorded here, the event waits for the copy only, not for what the stream gets after it.
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def are_known(self) -> bool:
        """True if `wait` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[int | None]:
        """Return the ids, on the host; None for a row with broken logits."""
        if self._event is not None:
            self._event.synchronize()
        return [token_id if token_id >= 0 else None for token_id in self._host.tolist()]


def placeholder(row: int) -> int:
    """Return the id, below 0, that stands for the token of `row` of the previous step until that token is known."""
    return ~row


def fill_in(token_ids: Tensor, previous: Tensor) -> Tensor:
    """Return `token_ids` with placeholders replaced by the previous step's sampled ids `previous`, on the device."""
    rows = (~token_ids).clamp(min=0, max=len(previous) - 1)
    # A row with broken logits has no token and its sequence ends. This step computes it all the same, with token 0.
    return torch.where(token_ids < 0, previous[rows].clamp(min=0), token_ids)
