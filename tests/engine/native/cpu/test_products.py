"""Products of packed weights compared with plain linear layers, for all splits of rows and panels into tiles."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.native.cpu.products import PackedWeight, PanelLinear, Products, fits_panels
from engine.native.model.grouped_weight import GroupedWeight
from engine.native.model.quantized import QuantizedLinear
from tests.engine.native.cpu.compiled import PRODUCTS, library_for_vnni, library_with

MakeLayer = Callable[..., nn.Linear]


@pytest.fixture(params=[*PRODUCTS, "vnni"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return library_for_vnni(monkeypatch) if request.param == "vnni" else library_with(request.param, monkeypatch)


def make_layer(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(out_features)
        return nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)


# Of all weights that files and `rounded` make: bits, inputs of a group, whether there are offsets.
KINDS = [(8, 32, False), (8, 16, False), (8, 32, True), (4, 32, False), (4, 32, True)]


def make_part(in_features: int, out_features: int, kind: tuple[int, int, bool]) -> GroupedWeight:
    """Return a random weight of a kind. Its numbers are near 0, and the mean of its inputs is not."""
    bits, group, has_offsets = kind
    random = torch.Generator().manual_seed(out_features)
    shape = (out_features, in_features // group)
    codes = torch.randint(0, 1 << bits, (*shape, group), dtype=torch.uint8, generator=random)
    scales = torch.rand(shape, generator=random) / (1 << bits)
    offsets = torch.rand(shape, generator=random) - 0.7 if has_offsets else None
    return GroupedWeight.of(codes, scales, offsets, bits, in_features)


def make_quantized(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """Return a layer with a part of each kind, if there are enough outputs."""
    sizes = [16] * min(len(KINDS), out_features // 16)
    sizes[-1] += out_features - sum(sizes)
    parts = [make_part(in_features, size, kind) for size, kind in zip(sizes, KINDS, strict=False)]
    plain = make_layer(in_features, out_features, bias)
    return QuantizedLinear(parts, plain.bias, torch.bfloat16)


def make_rows(rows: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Return random rows, bfloat16, and the same, float64, after their rounding to bytes, 32 inputs with a step.

    One number of each row is 100 times as large as the others. Numbers halfway between two bytes are left out: they may
    be rounded up or down.
    """
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
    x[:, 1] *= 100
    groups = x.double().unflatten(1, (-1, 32))
    steps = groups.abs().amax(dim=-1, keepdim=True) / 127
    is_halfway = ((groups / steps).frac().abs() - 0.5).abs() < 1e-4
    groups[is_halfway] = 0.0
    return groups.flatten(1).bfloat16(), ((groups / steps).round() * steps).flatten(1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 33, 48, 51])
@pytest.mark.parametrize(
    ("in_features", "out_features", "bias"),
    [(2, 16, False), (34, 48, True), (64, 64, False), (96, 112, True), (128, 176, True), (70, 400, False)],
)
def test_products(library: ctypes.CDLL, rows: int, in_features: int, out_features: int, bias: bool) -> None:
    layer = make_layer(in_features, out_features, bias)
    x = torch.randn(1, rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
    with torch.inference_mode():
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        actual = PanelLinear(layer, Products(library))(x)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, atol=0.01, rtol=0.01)


@torch.inference_mode()
def test_denormal_numbers_are_zero(library: ctypes.CDLL) -> None:
    """Dot products take them for that; multiplications of floats would take 300 times as long with them."""
    layer = make_layer(64, 48)
    rows, large = torch.full((9, 64), 1e-39, dtype=torch.bfloat16), torch.full((9, 64), 1e30, dtype=torch.bfloat16)
    assert rows.all() and not PanelLinear(layer, Products(library))(rows).any()
    layer.weight.fill_(1e-39)
    assert layer.weight.all() and not PanelLinear(layer, Products(library))(large).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 63, 64, 65, 131])
@pytest.mark.parametrize(
    ("in_features", "out_features", "bias"), [(32, 16, False), (96, 48, True), (128, 176, True), (64, 400, False)]
)
def test_quantised_products(
    library: ctypes.CDLL, kind: tuple[int, int, bool], rows: int, in_features: int, out_features: int, bias: bool
) -> None:
    plain = make_layer(in_features, out_features, bias)
    layer = QuantizedLinear([make_part(in_features, out_features, kind)], plain.bias, torch.bfloat16)
    x, rounded = make_rows(rows, in_features)
    with torch.inference_mode():
        expected = nn.functional.linear(rounded, layer.unpacked(torch.float64), layer.bias.double() if bias else None)
        actual = PanelLinear(layer, Products(library))(x)
    torch.testing.assert_close(actual.double(), expected, atol=0.001, rtol=0.004)  # half a step of bfloat16


def test_quantised_products_are_near_their_definition(library: ctypes.CDLL) -> None:
    layer = make_quantized(256, 176, bias=True)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        actual, expected = PanelLinear(layer, Products(library))(x).double(), layer.double()(x.double())
    assert (actual - expected).norm() < 0.008 * expected.norm()


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e30])
def test_quantised_products_of_extreme_rows(library: ctypes.CDLL, value: float) -> None:
    layer = make_quantized(32, 16)
    x = torch.full((2, 32), value, dtype=torch.bfloat16)
    out = PanelLinear(layer, Products(library))(x)
    with torch.inference_mode():
        expected = nn.functional.linear(x.double(), layer.unpacked(torch.float64))
    torch.testing.assert_close(out.double(), expected.bfloat16().double(), atol=1e-35, rtol=0.02)


@pytest.mark.parametrize("kind", [make_layer, make_quantized])
@pytest.mark.parametrize("rows", [2, 5, 16, 17, 40])
def test_a_row_does_not_depend_on_other_rows(library: ctypes.CDLL, rows: int, kind: MakeLayer) -> None:
    products, weight = Products(library), PackedWeight([kind(128, 176, bias=True)])
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    together = products.multiply(x, weight)
    alone = torch.cat([products.multiply(x[i : i + 1].clone(), weight) for i in range(rows)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", [make_layer, make_quantized])
def test_concatenated_weights(library: ctypes.CDLL, kind: MakeLayer) -> None:
    layers = [kind(32, 16), kind(32, 48, bias=True), kind(32, 32)]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        expected = torch.cat([layer(x) for layer in layers], dim=-1)
        actual = Products(library).multiply(x, PackedWeight(layers))
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", [make_layer, make_quantized])
def test_a_nan_stays_in_its_row(library: ctypes.CDLL, kind: MakeLayer) -> None:
    x = torch.ones(9, 32, dtype=torch.bfloat16)
    x[4, 7] = float("nan")
    with torch.inference_mode():
        out = PanelLinear(kind(32, 64), Products(library))(x)
    assert out[4].isnan().all()
    assert out[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_a_layer_that_does_not_fit_panels_is_refused() -> None:
    odd = make_layer(33, 16)
    assert not fits_panels(odd)
    assert not fits_panels(make_layer(32, 17))
    assert not fits_panels(QuantizedLinear.of(make_layer(48, 16), 8))
    with pytest.raises(ValueError, match="does not fit panels"):
        PackedWeight([odd])


def test_other_dtypes_have_no_products(library: ctypes.CDLL) -> None:
    assert not Products.available(library, torch.float32)
    assert not Products.available(None, torch.bfloat16)
