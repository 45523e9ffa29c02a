"""Count how often each token occurs in a sequence. The penalties of the sequence use these counts.

Knows only token ids. The counts depend only on the list of tokens: counting the tokens step by step gives the same
result as counting them all at once.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The counts of the distinct tokens of prompt and output, in the order of the tokens' first appearance."""

    __slots__ = ("_places", "_token_ids", "_counts", "num_counted")

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = array("q", self._places)
        self._counts = array("q", bytes(8 * len(self._places)))
        self.num_counted = 0  # output tokens counted so far

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The ids of the distinct tokens of prompt and output, (distinct tokens,)."""
        return np.array(self._token_ids, dtype=np.int64)

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """The occurrences of each distinct token in the output, (distinct tokens,); 0 for prompt-only tokens."""
        return np.array(self._counts, dtype=np.float32)

    def count(self, output_token_ids: Iterable[int]) -> None:
        """Count the next tokens of the output."""
        for token_id in output_token_ids:
            place = self._places.setdefault(token_id, len(self._token_ids))
            if place == len(self._token_ids):
                self._token_ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
            self.num_counted += 1
