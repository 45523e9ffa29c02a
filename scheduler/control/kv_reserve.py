"""KV blocks that bulk leaves free for interactive sequences: as many as these took lately, and some more.

The reserve is the mean growth of what they hold between two looks plus two standard deviations, both exponentially
weighted, within 5 and 30 % of all blocks. Knows counts of blocks; not which sequences hold them.
"""

import math

from engine.step_time.ewma import Ewma

MIN_RESERVE, MAX_RESERVE = 0.05, 0.30  # of all blocks
WEIGHT = 0.1  # of the newest look; one comes every half second, so that the memory is about five seconds
DEVIATIONS = 2.0  # standard deviations above the mean


class KVReserve:
    def __init__(self) -> None:
        self._held = 0
        self._mean = Ewma(WEIGHT)  # of the growth
        self._variance = Ewma(WEIGHT)
        self._num_blocks = 0

    def observe(self, held: int, num_blocks: int) -> None:
        """Interactive sequences hold `held` of `num_blocks` blocks now."""
        growth, self._held, self._num_blocks = max(0, held - self._held), held, num_blocks
        difference = growth - self._mean.value
        self._mean.add(growth)
        self._variance.add((1 - WEIGHT) * difference**2)

    @property
    def num_blocks(self) -> int:
        """Blocks that tiers without an SLO must leave free; 0 before the first look."""
        wanted = self._mean.value + DEVIATIONS * math.sqrt(self._variance.value)
        return math.ceil(min(MAX_RESERVE * self._num_blocks, max(MIN_RESERVE * self._num_blocks, wanted)))
