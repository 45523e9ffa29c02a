"""Who is told how far the start of an engine is: loading takes minutes for a large model. Plain data, without torch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Phase(Protocol):
    """One part of the start, while it lasts."""

    def show(self, done: int, total: int) -> None:
        """Say that `done` of `total` parts of the phase are done. May be called often."""
        ...


class Progress(Protocol):
    """Phases follow each other on one thread."""

    def phase(self, name: str, *, draws_itself: bool = False) -> AbstractContextManager[Phase]:
        """Return the phase `name`, such as "compiling the CPU kernels", which lasts as long as the block.

        `draws_itself` says that a library shows the progress of this phase on the terminal.
        """
        ...


class NoPhase:
    def show(self, done: int, total: int) -> None:
        pass


class NoProgress:
    """Tells nobody. Implements `Progress`."""

    @contextmanager
    def phase(self, name: str, *, draws_itself: bool = False) -> Iterator[Phase]:
        yield NO_PHASE


NO_PHASE = NoPhase()
NO_PROGRESS = NoProgress()
