"""Fills a batch whose tail is empty, and discards what the endpoint returns for the padding."""

from collections.abc import Sequence
from typing import TypeVar

from engine.static.interface import CallFailed

T = TypeVar("T")


def padded(items: Sequence[T], batch: int) -> list[T]:
    """Return exactly `batch` items: the last one is repeated, because an endpoint may accept nothing but real items."""
    if not 0 < len(items) <= batch:
        raise ValueError(f"{len(items)} items do not make a batch of {batch}")
    return [*items, *[items[-1]] * (batch - len(items))]


def without_padding(results: Sequence[T], count: int, batch: int) -> list[T]:
    """Return the first `count` of `batch` results. Raises `CallFailed` if there are not as many as the batch has."""
    if len(results) != batch:
        raise CallFailed(f"The endpoint returned {len(results)} results for a batch of {batch}.")
    return list(results[:count])
