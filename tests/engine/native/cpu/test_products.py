"""Products of packed weights compared with plain linear layers, for all splits of rows and panels into tiles."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.native.cpu.products import PackedWeight, PanelLinear, Products, fits_panels
from engine.native.model.quantized import QuantizedLinear
from tests.engine.native.cpu.compiled import library_with

MakeLayer = Callable[..., nn.Linear]


@pytest.fixture(params=["dots", "tiles"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return library_with(request.param, monkeypatch)


def make_layer(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(out_features)
        return nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)


def make_quantized(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    return QuantizedLinear.of(make_layer(in_features, out_features, bias))


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


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 63, 64, 65, 131])
@pytest.mark.parametrize(
    ("in_features", "out_features", "bias"), [(4, 16, False), (36, 48, True), (128, 176, True), (72, 400, False)]
)
def test_int8_products(library: ctypes.CDLL, rows: int, in_features: int, out_features: int, bias: bool) -> None:
    """Rows have one number that is 100 times as large as the others: as exact as bfloat16 beside it."""
    layer = QuantizedLinear.of(make_layer(in_features, out_features, bias))
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
    x[:, 1] *= 100
    with torch.inference_mode():
        weight = layer.codes.double() * layer.scales.double()[:, None]
        expected = nn.functional.linear(x.double(), weight, layer.bias.double() if bias else None)
        actual = PanelLinear(layer, Products(library))(x)
    torch.testing.assert_close(actual.double(), expected, atol=0.003 * float(x.abs().max()) / 100, rtol=0.004)


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38])
def test_int8_products_of_extreme_rows(library: ctypes.CDLL, value: float) -> None:
    layer = QuantizedLinear.of(make_layer(32, 16))
    x = torch.full((2, 32), value, dtype=torch.bfloat16)
    out = PanelLinear(layer, Products(library))(x)
    with torch.inference_mode():
        expected = nn.functional.linear(x.double(), layer.codes.double() * layer.scales.double()[:, None])
    torch.testing.assert_close(out.double(), expected, atol=1e-35, rtol=0.02)


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
    assert not fits_panels(make_quantized(34, 16))
    with pytest.raises(ValueError, match="does not fit panels"):
        PackedWeight([odd])


def test_other_dtypes_have_no_products(library: ctypes.CDLL) -> None:
    assert not Products.available(library, torch.float32)
    assert not Products.available(None, torch.bfloat16)
