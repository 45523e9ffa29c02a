"""What tokens cost, by model and tier. Pure.

Money is counted in whole billionths of the currency's unit, so that sums are exact; the currency itself is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NANO = 10**9  # of them make one unit of the currency
PER = 10**6  # tokens for which a price is


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a million prompt tokens, of those among them that were cached (None: the same), and of output tokens.

    They are for one model (None: all) in one tier (None: all).
    """

    input: float
    output: float
    cached: float | None = None
    model: str | None = None
    tier: str | None = None

    def cost_nano(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return what these tokens cost. The cached tokens are a part of the prompt's."""
        cached = self.input if self.cached is None else self.cached
        per_million = (
            (prompt_tokens - cached_tokens) * self.input + cached_tokens * cached + output_tokens * self.output
        )
        return round(per_million * (NANO // PER))


FREE = Price(0.0, 0.0)


class PriceList:
    """The prices in force. The first one that fits counts; without one, tokens cost nothing."""

    def __init__(self, prices: Sequence[Price] = ()) -> None:
        self.prices = tuple(prices)

    def replace(self, prices: Sequence[Price]) -> None:
        """Use these prices from now on, also for what is under way."""
        self.prices = tuple(prices)

    def of(self, model: str, tier: str) -> Price:
        fitting = (p for p in self.prices if p.model in (None, model) and p.tier in (None, tier))
        return next(fitting, FREE)
