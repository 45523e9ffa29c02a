"""Log probabilities compared with their definition."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.native.sampling.logprobs import token_logprobs


@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_log_softmax_with_the_likeliest_first_and_the_lower_id_of_equal_ones(
    seed: int, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few different values, so that there are ties everywhere, also at the last place of the top.
    logits = torch.randint(-3, 3, (rows, 40), generator=generator).to(dtype)
    token_ids = torch.randint(0, 40, (rows,), generator=generator).tolist()
    num_top = torch.randint(0, 21, (rows,), generator=generator).tolist()
    found = token_logprobs(logits, token_ids, num_top)
    for row, token_id, count, entry in zip(logits.float().log_softmax(-1), token_ids, num_top, found, strict=True):
        values = row.tolist()
        ranked = sorted(range(40), key=lambda i: (-values[i], i))[:count]
        assert entry.token_id == token_id
        assert entry.logprob == values[token_id]
        assert entry.top == tuple((i, values[i]) for i in ranked)


def test_more_rows_than_one_pass_takes() -> None:
    logits = torch.randn(150, 30, generator=torch.Generator().manual_seed(1))
    ids = [i % 30 for i in range(150)]
    found = token_logprobs(logits, ids, [3] * 150)
    assert [entry.token_id for entry in found] == ids
    assert [entry.logprob for entry in found] == logits.log_softmax(-1)[range(150), ids].tolist()


@pytest.mark.parametrize("count", [0, 2, 5, 100])
def test_impossible_tokens_have_finite_values(count: int) -> None:
    """JSON has no infinity. Asking for more likeliest tokens than there are returns all of them."""
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf, -math.inf]])
    (entry,) = token_logprobs(logits, [1], [count])
    assert entry.logprob == -9999.0
    assert [i for i, _ in entry.top] == [0, 2, 1, 3, 4][:count]
    json.dumps(asdict(entry), allow_nan=False)
