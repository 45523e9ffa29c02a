"""Token ids that a step has chosen, on the device, and on their way to the host while the device goes on.

Knows ids and when their copy is done; not whose they are. The next step may read them where they are: a row whose token
the host does not know yet names it by its place among them.
"""

import torch
from torch import Tensor


class SampledTokens:
    """`ids`: (rows,), below 0 where a row's logits were broken."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._host, self._event = ids, None
        if ids.device.type == "cuda":
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            # Of the copy, not of what the stream is given after it.
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def are_known(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[int | None]:
        """The ids on the host; None where a row's logits were broken."""
        if self._event is not None:
            self._event.synchronize()
        return [token_id if token_id >= 0 else None for token_id in self._host.tolist()]


def place_holder(row: int) -> int:
    """What stands for the token of `row` of the step before, until it is known: below 0, as no token is."""
    return ~row


def fill_in(token_ids: Tensor, previous: Tensor) -> Tensor:
    """`token_ids` with its place holders replaced by what they stand for among `previous`, on the device."""
    rows = (~token_ids).clamp(min=0, max=len(previous) - 1)
    # A broken row's sequence ends; what the row after it computes is never looked at, but must have a token.
    return torch.where(token_ids < 0, previous[rows].clamp(min=0), token_ids)
