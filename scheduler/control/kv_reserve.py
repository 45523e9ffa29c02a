"""The KV reserve: the number of KV blocks that bulk must leave free for interactive sequences.

The reserve follows the recent growth of the number of blocks that interactive sequences hold. It is the mean growth
between two observations plus two standard deviations, both exponentially weighted, and lies between 5 % and 30 % of all
blocks. Knows counts of blocks; does not know which sequences hold them.
"""

import math

from engine.step_time.ewma import Ewma

MIN_RESERVE, MAX_RESERVE = 0.05, 0.30  # bounds of the reserve, as shares of all blocks
WEIGHT = 0.1  # weight of the newest observation; with one every half second, the memory is about five seconds
DEVIATIONS = 2.0  # number of standard deviations that are added to the mean


class KVReserve:
    """The number of blocks to leave free, computed from observations of interactive sequences."""

    def __init__(self) -> None:
        self._held = 0
        self._mean = Ewma(WEIGHT)  # mean growth between two observations, in blocks
        self._variance = Ewma(WEIGHT)  # variance of the growth
        self._num_blocks = 0

    def observe(self, held: int, num_blocks: int) -> None:
        """Record that interactive sequences hold `held` of `num_blocks` blocks now."""
        growth, self._held, self._num_blocks = max(0, held - self._held), held, num_blocks
        difference = growth - self._mean.value
        self._mean.add(growth)
        self._variance.add((1 - WEIGHT) * difference**2)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that tiers without a latency SLO must leave free; 0 before the first observation."""
        wanted = self._mean.value + DEVIATIONS * math.sqrt(self._variance.value)
        return math.ceil(min(MAX_RESERVE * self._num_blocks, max(MIN_RESERVE * self._num_blocks, wanted)))
