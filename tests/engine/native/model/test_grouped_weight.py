"""Matrices as codes by groups: what is rounded, by how much, and that parts of a matrix are parts of its numbers."""

import pytest
import torch
from torch import Tensor

from engine.native.model.grouped_weight import GroupedWeight, joined, rounded, rounded_bytes


def make_weight(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(out_features))


@pytest.mark.parametrize("in_features", [4, 32, 40, 96])
def test_codes_of_8_bits_round_by_at_most_half_a_step(in_features: int) -> None:
    weight = make_weight(9, in_features)
    weight[3] *= 1e6
    weight[4] = 0.0
    weight[5] *= 1e-9
    weight[6] *= 1e-42
    found = rounded(weight, 8)
    assert found.codes.nbytes + found.scales.nbytes + found.units.nbytes == rounded_bytes(weight, 8)
    assert found.unpacked(torch.float32)[6].isfinite().all()
    for group, numbers in zip(weight.split(32, dim=1), found.unpacked(torch.float32).split(32, dim=1), strict=True):
        steps = group.abs().amax(dim=1, keepdim=True) / 127
        assert ((numbers - group).abs() <= 0.6 * steps + 1e-38).all()  # half a step, and scales are rounded to float16
    assert (found.unpacked(torch.float32)[4] == 0).all()


def test_numbers_that_8_bits_hold_are_not_changed() -> None:
    held = rounded(make_weight(16, 96), 8).unpacked(torch.float32)
    assert torch.equal(rounded(held, 8).unpacked(torch.float32), held)


@pytest.mark.parametrize("in_features", [4, 32, 40, 96])
def test_codes_of_4_bits_are_better_than_steps_over_the_whole_range(in_features: int) -> None:
    weight = make_weight(9, in_features)
    weight[3] *= 1e6
    weight[4] = 3.5  # one number only
    weight[5] *= 1e-9
    found = rounded(weight, 4)
    sizes = [t.nbytes for t in (found.codes, found.scales, found.offsets, found.units)]
    assert sum(sizes) == rounded_bytes(weight, 4)
    errors = (found.unpacked(torch.float32) - weight).norm(dim=1)
    padded = torch.nn.functional.pad(weight, (0, -in_features % 32)).unflatten(1, (-1, 32))
    lowest, highest = padded.amin(dim=-1, keepdim=True), padded.amax(dim=-1, keepdim=True)
    steps = ((highest - lowest) / 15).clamp(min=1e-30)
    plain = ((padded - lowest) / steps).round() * steps + lowest
    bounds = (plain - padded).flatten(1).norm(dim=1)
    assert (errors <= bounds + 1e-3 * weight.norm(dim=1)).all()
    assert (errors / torch.maximum(bounds, 1e-3 * weight.norm(dim=1))).mean() < 0.97


def test_inputs_with_large_activations_count_more() -> None:
    weight = make_weight(16, 64)
    importance = torch.ones(64)
    importance[::9] = 100.0
    plain, weighted = (
        ((rounded(weight, 4, counted).unpacked(torch.float32) - weight).square() @ importance).sum()
        for counted in (None, importance)
    )
    assert weighted < 0.8 * plain


def test_a_scale_is_exact_beside_scales_that_are_much_larger() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(1, 2, 32)
    scales, offsets = torch.tensor([[4096.0, 2**-14]]), torch.tensor([[-7.0, 2**-13]])
    expected = codes.double() * scales.double()[..., None] + offsets.double()[..., None]
    found = GroupedWeight.of(codes, scales, offsets, 8, 64)
    assert torch.equal(found.unpacked(torch.float64), expected.flatten(1))


def test_codes_of_4_bits_are_counted_from_the_middle_without_offsets() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 1, 32)
    found = GroupedWeight.of(codes, torch.tensor([[0.5]]), None, 4, 32)
    assert found.unpacked(torch.float32).tolist() == [[0.5 * (i % 16 - 8) for i in range(32)]]
    assert found.codes.tolist() == [[17 * i for i in range(16)]]  # input j below input j + 16


def test_many_numbers_are_rounded_and_unpacked_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(33, 64)
    expected = {bits: rounded(weight, bits).unpacked(torch.float32) for bits in (4, 8)}
    monkeypatch.setattr("engine.native.model.grouped_weight._AT_ONCE", 300)
    for bits in (4, 8):
        assert torch.equal(rounded(weight, bits).unpacked(torch.float32), expected[bits])


@pytest.mark.parametrize("bits", [4, 8])
def test_some_of_the_inputs(bits: int) -> None:
    weight = rounded(make_weight(5, 160), bits)
    assert torch.equal(weight.inputs(32, 96).unpacked(torch.float32), weight.unpacked(torch.float32)[:, 32:128])


def test_rows_and_neighbours_of_one_kind() -> None:
    weights = [rounded(make_weight(size, 64), bits) for size, bits in ((3, 4), (5, 4), (2, 8), (4, 4))]
    together = joined(weights)
    assert [part.out_features for part in together] == [8, 2, 4]
    numbers = torch.cat([part.unpacked(torch.float32) for part in together])
    assert torch.equal(numbers, torch.cat([weight.unpacked(torch.float32) for weight in weights]))
    order = torch.tensor([4, 0, 7])
    assert torch.equal(together[0].rows(order).unpacked(torch.float32), numbers[order])
