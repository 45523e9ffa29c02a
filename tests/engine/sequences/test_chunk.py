"""What of a draft is accepted."""

import pytest

from engine.interface import TokenLogprobs
from engine.sequences.chunk import Chunk, Outcome
from engine.sequences.sequence import Sequence
from tests.engine.drive import make_new


def sampled(token_id: int) -> Outcome:
    return Outcome((token_id,), (TokenLogprobs(token_id, -float(token_id)),))


BROKEN = Outcome(failure="broken")


@pytest.mark.parametrize(
    ("draft", "rows", "token_ids"),
    [
        ((), [sampled(5)], (5,)),
        ((5, 6), [sampled(5), sampled(6), sampled(7)], (5, 6, 7)),
        ((5, 6), [sampled(5), sampled(9), sampled(7)], (5, 9)),
        ((5, 6), [sampled(8), sampled(6), sampled(7)], (8,)),
        ((5, 9, 6), [sampled(5), sampled(9), sampled(6), sampled(7)], (5, 9, 6, 7)),
        ((0, 6), [sampled(0), sampled(6), sampled(7)], (0,)),  # 0 ends the sequence
        ((5, 6), [BROKEN, sampled(6), sampled(7)], ()),
        ((5, 5, 5), [sampled(5), BROKEN, sampled(5), sampled(5)], (5,)),  # computed again in the next step
    ],
)
def test_tokens_count_up_to_the_first_that_the_draft_does_not_have(
    draft: tuple[int, ...], rows: list[Outcome], token_ids: tuple[int, ...]
) -> None:
    sequence = Sequence(make_new("a", [1, 2, 3], max_tokens=20), 100, (0,))
    chunk = Chunk(sequence, 2, 1, draft=draft)
    outcome = chunk.verified(rows)
    assert (outcome.token_ids, tuple(entry.token_id for entry in outcome.logprobs)) == (token_ids, token_ids)
    assert outcome.failure == (None if token_ids else "broken")
    assert chunk.num_computed(outcome.token_ids) == 3 + max(0, len(token_ids) - 1)
