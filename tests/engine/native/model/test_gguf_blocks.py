"""Blocks of GGUF files hold the numbers that the package gguf finds in them."""

import pytest
import torch

from engine.native.model.gguf_blocks import KEPT, weight_of
from tests.engine.gguf_files import random_blocks

gguf = pytest.importorskip("gguf")
OUT, IN = 7, 512


@pytest.mark.parametrize("rows_at_once", [1, 3, OUT])
@pytest.mark.parametrize("kind", KEPT)
def test_blocks_hold_the_numbers_of_the_file(kind: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_blocks(kind, (OUT, IN), 1)
    monkeypatch.setattr("engine.native.model.gguf_blocks._AT_ONCE", rows_at_once * rows.shape[1])
    expected = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    weight = weight_of(torch.from_numpy(rows), kind, IN)
    found = weight.unpacked(torch.float32)
    if kind in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"):  # their scales are products, which float16 rounds
        assert ((found - expected).abs() <= 6e-4 * expected.abs().amax()).all()
        assert (found - expected).norm() < 4e-4 * expected.norm()
    else:
        assert torch.equal(found, expected)


def test_codes_of_four_bits_stay_small() -> None:
    assert {kind: weight_of(torch.from_numpy(random_blocks(kind, (OUT, IN), 1)), kind, IN).kind for kind in KEPT} == {
        "Q8_0": (8, 32, False),
        "Q4_0": (4, 32, False),
        "Q4_1": (4, 32, True),
        "Q5_0": (8, 32, False),
        "Q5_1": (8, 32, True),
        "Q3_K": (8, 16, False),
        "Q4_K": (4, 32, True),
        "Q5_K": (8, 32, True),
        "Q6_K": (8, 16, False),
        "IQ4_NL": (8, 32, False),
        "IQ4_XS": (8, 32, False),
    }
