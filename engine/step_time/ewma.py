"""An exponentially weighted moving average, for step times, tier statistics and capacities."""


class Ewma:
    """`value` moves towards each sample by a share of their distance."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float, value: float = 0.0) -> None:
        """`weight` of the newest sample, in (0, 1]; `value` before the first one."""
        self.weight = weight
        self.value = value

    def add(self, sample: float, weight: float | None = None) -> float:
        """Take in a sample, with `weight` in place of the usual one; return the new average."""
        self.value += (self.weight if weight is None else weight) * (sample - self.value)
        return self.value
