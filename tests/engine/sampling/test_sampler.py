"""The samplers compared with plain definitions of their results."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.interface import SamplingParams
from engine.native.cpu.sampler import CpuSampler
from engine.sampling.sampler import Sampler, SamplingRow, uniform
from engine.sampling.sampler import sample as sample_by_torch
from tests.engine.native.cpu.compiled import compiled_library


@pytest.fixture(scope="module", params=["torch", "c++"])
def sample(request: pytest.FixtureRequest) -> Sampler:
    """Each test runs with both samplers."""
    if request.param == "torch":
        return sample_by_torch
    return CpuSampler(compiled_library())


def row(index: int = 0, **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**{"max_tokens": 1, **params}), index)  # type: ignore[arg-type]


def make_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def allowed_tokens(logits: Tensor, params: SamplingParams) -> set[int]:
    """The kept tokens by definition: top_k likeliest, of these the fewest that sum to top_p, none below min_p."""
    scaled = (logits.double() / params.temperature).tolist()
    ranked = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: params.top_k or None]
    weights = [math.exp(scaled[i] - scaled[ranked[0]]) for i in ranked]
    allowed, mass = set(), 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if mass >= params.top_p * sum(weights) or weight < params.min_p:
            break
        allowed.add(token)
        mass += weight
    return allowed


def test_greedy_is_the_argmax(sample: Sampler) -> None:
    logits = make_logits(5, 50)
    rows = [row(temperature=0.0), row(temperature=1e-9), row(top_k=1), row(temperature=0.0, top_p=0.1)]
    assert sample(logits[:4], rows) == logits[:4].argmax(-1).tolist()


@given(
    temperature=st.floats(0.2, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 60),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(0, 2**63),
)
def test_tokens_excluded_by_top_k_top_p_and_min_p_are_never_drawn(
    sample: Sampler, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = make_logits(1, 50, seed % 7)
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    rows = [row(i, **options, seed=seed) for i in range(100)]
    drawn = sample(logits.expand(100, -1), rows)
    assert set(drawn) <= allowed_tokens(logits[0], rows[0].params)


@pytest.mark.parametrize("seed", range(3))
def test_transformers_warpers_keep_the_same_tokens(sample: Sampler, seed: int) -> None:
    """Over many uniform numbers, all tokens with a probability are drawn, and no others."""
    rng = random.Random(seed)
    options = {
        "temperature": rng.uniform(0.3, 2.0),
        "top_k": rng.choice([0, 5, 30]),
        "top_p": rng.choice([1.0, 0.95, 0.5]),
        "min_p": rng.choice([0.02, 0.1, 0.5]),
    }
    logits = make_logits(1, 50, seed)
    warpers = [TemperatureLogitsWarper(options["temperature"])]
    warpers += [TopKLogitsWarper(int(options["top_k"]))] if options["top_k"] else []
    warpers += [TopPLogitsWarper(options["top_p"]), MinPLogitsWarper(options["min_p"])]
    warped = logits
    for warper in warpers:
        warped = warper(torch.tensor([[1]]), warped)
    probabilities = warped.softmax(-1)[0]
    drawn = sample(logits.expand(4000, -1), [row(i, **options) for i in range(4000)])
    counts = torch.bincount(torch.tensor(drawn), minlength=50) / 4000
    assert counts[probabilities == 0].sum() == 0
    assert (counts - probabilities).abs().max() < 0.04


@pytest.mark.parametrize("params", [{"top_p": 0.9, "top_k": 2000}, {"temperature": 9.0, "top_p": 0.5}])
def test_thresholds_beyond_the_candidates_are_exact(sample: Sampler, params: dict[str, object]) -> None:
    """The distribution is so flat that top_p and top_k reach past the candidates searched first."""
    logits = make_logits(1, 4000) / 3
    rows = [row(i, **params) for i in range(900)]
    drawn = sample(logits.expand(900, -1), rows)
    allowed = allowed_tokens(logits[0], rows[0].params)
    assert set(drawn) <= allowed
    assert len(set(drawn)) > 300


def test_frequencies_are_probabilities(sample: Sampler) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    count = 8000
    drawn = sample(probabilities.log().expand(count, -1), [row(i, seed=1) for i in range(count)])
    counts = torch.bincount(torch.tensor(drawn), minlength=5) / count
    assert counts[4] == 0
    assert torch.allclose(counts, probabilities, atol=0.02)


def test_a_token_depends_on_its_own_row_only(sample: Sampler) -> None:
    logits = make_logits(8, 3000)
    rows = [
        row(0, seed=1),
        row(1, seed=1, top_p=0.9),
        row(2, seed=2, top_k=5),
        row(3, temperature=0.0),
        row(4, seed=3, top_k=1200, top_p=0.99),
        row(5, seed=4, temperature=2.0, top_p=0.999),
        row(6, seed=5, temperature=2.0, min_p=0.05),
        row(7, seed=6, top_k=900, min_p=0.01),
    ]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)] == together
    backwards = list(reversed(range(8)))
    assert sample(logits[backwards], [rows[i] for i in backwards]) == together[::-1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 4}, {"min_p": 0.1}])
def test_broken_logits_are_reported_per_row(sample: Sampler, value: float, params: dict[str, object]) -> None:
    logits = make_logits(3, 50)
    rows = [row(i, **params) for i in range(3)]
    good = sample(logits, rows)
    logits[1, 17] = value
    assert sample(logits, rows) == [good[0], None, good[2]]


def test_a_masked_row_is_sampled_unless_all_of_it_is_masked(sample: Sampler) -> None:
    logits = torch.full((2, 10), float("-inf"))
    logits[0, 3] = 0.5
    assert sample(logits, [row(seed=5), row(seed=5)]) == [3, None]


def test_random_numbers_are_spread_and_repeatable() -> None:
    values = [uniform(row(i, seed=s)) for s in range(50) for i in range(50)]
    assert all(0 < v < 1 for v in values)
    assert len(set(values)) > 2490
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert values[:50] == [uniform(row(i, seed=0)) for i in range(50)]
    assert uniform(row(0, seed=-1)) != uniform(row(0, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_samplers_draw_the_same_tokens(sample: Sampler, dtype: torch.dtype) -> None:
    """One token in a thousand may differ: its cumulative probability rounds differently near the uniform number."""
    rng = random.Random(1)
    logits = make_logits(600, 3000, seed=3).to(dtype)
    rows = [
        row(
            i,
            temperature=rng.choice([0.0, 0.5, 1.0]),
            top_k=rng.choice([0, 7, 500]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
        )
        for i in range(600)
    ]
    same = sum(a == b for a, b in zip(sample(logits, rows), sample_by_torch(logits, rows), strict=True))
    assert same >= 595
