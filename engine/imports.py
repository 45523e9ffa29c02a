"""Imports many modules at a start, without the garbage collections that would run meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Run no garbage collection within the block, which imports modules.

    Modules stay for good, and their objects are many: each collection looks through all of them and frees next to
    none. Together they take a seventh of the time in which PyTorch and transformers are imported.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
