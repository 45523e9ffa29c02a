"""How a running step is suspended between two layers: what the thread of the steps and the computation of a step share.

While a step is suspended, other steps run inside `Suspender.wait`, on the same thread. So everything that the suspended
step had computed stays where it is: in local variables of the code that computes it.
"""

from typing import Protocol

from engine.interface import StepResult


class StepDropped(Exception):
    """Ends the computation of a suspended step that is dropped."""


class Suspender(Protocol):
    """Says when the running step is suspended, and waits while it is. A step asks it between two layers."""

    def is_due(self) -> bool:
        """Return whether to suspend the running step now."""
        ...

    def wait(self, suspended: StepResult) -> None:
        """Run other steps until the step is to go on. Raises `StepDropped` if it is dropped instead."""
        ...
