"""The token ids that a step has sampled. They are on the device, and are copied to the host asynchronously.

With async scheduling, the next step reads these ids on the device. If the host does not know the input token of a row
yet, the row holds a placeholder, which says which row of the previous step samples the token. Knows token ids and how
they are copied; does not know sequences.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future

import torch
from torch import Tensor


class SampledTokens:
    """The sampled token ids of one step, on the device and on the host.

    `ids` is the tensor (rows,) on the device. An id below 0 marks a row with broken logits. `waiter` has one thread,
    which waits until the copy to the host is complete. So an error of the device is raised by `wait`, and nobody asks
    the device again and again. `begun` is the moment at which the device began the step, if it tells the time.
    """

    def __init__(self, ids: Tensor, waiter: Executor, begun: torch.cuda.Event | None = None) -> None:
        self.ids = ids
        self._host = ids
        self._copied: Future[None] = Future()
        self._begun, self._ended = begun, begun
        if ids.device.type == "cuda":
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            # The event is recorded right after the copy, so that nobody waits for later work. The stream is named,
            # because the thread's current device may be another one.
            self._ended = moment_on(ids.device)
            self._copied = waiter.submit(self._ended.synchronize)
        else:
            self._copied.set_result(None)

    @property
    def are_known(self) -> bool:
        """True if `wait` would return without waiting."""
        return self._copied.done()

    def call_when_known(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the copy is complete or has failed, on the waiter's thread or at once."""
        self._copied.add_done_callback(lambda _: callback())

    def wait(self) -> list[int | None]:
        """Wait for the copy and return the ids as a list; the item of a row with broken logits is None.

        Raises the errors of the device.
        """
        self._copied.result()
        return [token_id if token_id >= 0 else None for token_id in self._host.tolist()]

    def device_s(self) -> float | None:
        """Return the seconds that the device took from `begun` until the copy was complete; None if `begun` is None.

        Call it after `wait`. The host may learn much later that a step has ended, for example while it launches the
        kernels of the next one, so its clock would add that time to this step and take it from the next.
        """
        if self._begun is None or self._ended is None:
            return None
        return float(self._begun.elapsed_time(self._ended)) / 1000


def moment_on(device: torch.device) -> torch.cuda.Event:
    """Return the moment at which the device, a GPU, will have done the work that it has been given so far."""
    # A blocking event does not keep a core busy.
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def placeholder(row: int) -> int:
    """Return the placeholder for the token that `row` of the previous step samples.

    The placeholder is below 0. It stands for the token until the host knows the token.
    """
    return ~row


def fill_in(token_ids: Tensor, previous: Tensor) -> Tensor:
    """Return `token_ids`, on the device, with each placeholder replaced by the token that it stands for.

    `previous` holds the sampled ids of the previous step.
    """
    rows = (~token_ids).clamp(min=0, max=len(previous) - 1)
    # A row with broken logits has no token, and its sequence ends. This step still computes the row, with token 0.
    return torch.where(token_ids < 0, previous[rows].clamp(min=0), token_ids)
