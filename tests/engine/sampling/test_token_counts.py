"""Counting step by step and counting all at once give the same counts."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.penalties import TokenCounts

tokens = st.lists(st.integers(0, 9), max_size=40)


@given(prompt=tokens, output=tokens, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_counts_are_those_of_the_output_over_all_tokens(prompt: list[int], output: list[int], cuts: list[int]) -> None:
    counts = TokenCounts(prompt)
    for end in sorted(min(cut, len(output)) for cut in cuts) + [len(output)]:
        counts.count(output[counts.num_counted : end])
    assert counts.num_counted == len(output)
    assert counts.token_ids.tolist() == list(dict.fromkeys(prompt + output))
    held = Counter(output)
    assert counts.output_counts.tolist() == [held[token_id] for token_id in counts.token_ids.tolist()]
