"""The log probabilities that the steps of an engine report, and how two engines' are compared."""

from collections import defaultdict

import pytest

from engine.interface import StepResult, TokenLogprobs


class Reported:
    """Log probabilities per sequence, collected from the steps' results."""

    def __init__(self) -> None:
        self.output: defaultdict[str, list[TokenLogprobs]] = defaultdict(list)
        self.prompt: defaultdict[str, list[TokenLogprobs]] = defaultdict(list)

    def __call__(self, result: StepResult) -> None:
        for output in result.outputs:
            self.output[output.seq_id] += output.logprobs
            self.prompt[output.seq_id] += output.prompt_logprobs


def assert_alike(own: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Assert the same tokens with the same values, up to fp32 rounding of another summation order.

    Logits lie up to 100 apart, so that a relative error of 1e-5 of a logit is 1e-3.
    """
    assert [_token_ids(entry) for entry in own] == [_token_ids(entry) for entry in expected]
    for found, other in zip(own, expected, strict=True):
        assert found.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [value for _, value in found.top] == pytest.approx([value for _, value in other.top], abs=1e-3)


def _token_ids(entry: TokenLogprobs) -> list[int]:
    return [entry.token_id, *(token_id for token_id, _ in entry.top)]
