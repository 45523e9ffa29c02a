"""How often each token stands in a sequence: what its penalties are made of.

Knows token ids only. The counts follow the sequence's list of tokens, so they are the same whether they were kept
all along or made afresh.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Distinct tokens in the order of their first appearance, the prompt's before those of the output."""

    __slots__ = ("_places", "_token_ids", "_counts", "num_counted")

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = array("q", self._places)
        self._counts = array("q", bytes(8 * len(self._places)))
        self.num_counted = 0  # tokens of the output

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """(distinct tokens of prompt and output,)"""
        return np.array(self._token_ids, dtype=np.int64)

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """(distinct tokens,): how often the output holds each of them; 0 for one of the prompt only."""
        return np.array(self._counts, dtype=np.float32)

    def count(self, output_token_ids: Iterable[int]) -> None:
        """Take in the next tokens of the output."""
        for token_id in output_token_ids:
            place = self._places.setdefault(token_id, len(self._token_ids))
            if place == len(self._token_ids):
                self._token_ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
            self.num_counted += 1
