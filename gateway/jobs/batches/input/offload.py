"""Work on a batch's input beside the event loop: on a short one in a thread, on a longer one in another process.

A parser holds Python's global lock for as long as a line takes, so in a thread long lines would stop all streams. The
processes come after streams and the engine on the same cores, and few run at once, so that many batches at a time leave
processes for the bodies of requests.
"""

import asyncio
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_process

from gateway.protocol.json_body import INLINE_SIZE, PARSE_NICENESS, is_long, unpickled

T = TypeVar("T")

_processes = anyio.CapacityLimiter(2)  # a second one, so that a short input need not wait for the longest
_loading = anyio.CapacityLimiter(1)  # apart from these, because a line waits for no whole input


async def offload(path: Path, function: Callable[..., T], *args: Any) -> T:
    """Return `function(path, *args)`. All must be picklable."""
    if not await asyncio.to_thread(_is_long, path):
        return await asyncio.to_thread(function, path, *args)
    work = partial(_run_here, function, path, *args)
    return await anyio.to_process.run_sync(work, cancellable=True, limiter=_processes)


async def offload_short(path: Path, function: Callable[..., T], *args: Any) -> T:
    """Return `function(path, *args)`, which takes another process less than a second. All must be picklable.

    A large result is unpickled in a thread: anyio would do it on the event loop, which takes long for many parts.
    """
    work = partial(_run_here, _pickled, function, path, *args)
    pickled = await anyio.to_process.run_sync(work, cancellable=True, limiter=_loading)
    result: T = await asyncio.to_thread(unpickled, pickled)
    return result


def _is_long(path: Path) -> bool:
    return path.stat().st_size > INLINE_SIZE or is_long(path.read_bytes())


def _pickled(function: Callable[..., Any], *args: Any) -> bytes:
    return pickle.dumps(function(*args), pickle.HIGHEST_PROTOCOL)


def _run_here(function: Callable[..., T], *args: Any) -> T:
    os.nice(max(0, PARSE_NICENESS - os.nice(0)))
    return function(*args)
