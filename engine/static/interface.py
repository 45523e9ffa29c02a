"""The call of an endpoint that takes exactly B items at once and cannot be changed: what it takes and returns.

Plain data. Items and outputs are JSON texts, so that nobody between the client and the endpoint has to read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What the endpoint says of one item: its output as JSON, or why it has none."""

    output: bytes = b"null"
    error: str = ""


class CallFailed(Exception):
    """A whole call failed. The message says why, in one sentence.

    If `excused_s` is above 0, the endpoint says that it takes no work at the moment. None of the items is the cause of
    that unless it lasts for longer. The endpoint should not be called again for `retry_after_s` seconds.
    """

    def __init__(self, reason: str, excused_s: float = 0.0, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.excused_s = excused_s
        self.retry_after_s = retry_after_s

    @property
    def is_busy(self) -> bool:
        """Whether the endpoint says that it takes no work at the moment."""
        return self.excused_s > 0


class Unreachable(Exception):
    """The endpoint cannot be reached: it has got none of the items."""


class EndpointHangs(Exception):
    """A function has not returned in time. Its thread cannot be ended, so the process should be."""


class Endpoint(Protocol):
    @property
    def name(self) -> str: ...

    async def call(self, items: Sequence[bytes], traceparent: str = "") -> list[ItemResult]:
        """Return one result for each of `items` (at least one, at most a batch), in their order.

        `traceparent` is the W3C trace context of the call, for endpoints behind HTTP; empty: the call is not traced.
        Raises `CallFailed`, `Unreachable` or `EndpointHangs`.
        """
        ...

    async def close(self) -> None: ...


def padded(items: Sequence[T], batch: int) -> list[T]:
    """Return exactly `batch` items: the last one is repeated, because an endpoint may accept nothing but real items."""
    return [*items, *[items[-1]] * (batch - len(items))]


def without_padding(results: Sequence[T], count: int, batch: int) -> list[T]:
    """Return the first `count` of `batch` results. Raises `CallFailed` if there are not as many as the batch has."""
    if len(results) != batch:
        raise CallFailed(f"The endpoint returned {len(results)} results for a batch of {batch}.")
    return list(results[:count])
