"""The compiled C++ kernels for tests: without a compiler tests are skipped; with one the kernels must build."""

import ctypes
import shutil

import pytest
import torch

from engine.native.cpu.build import load_library
from engine.native.cpu.processors import cpu_flags, processors

PRODUCTS = ("dots", "floats", "tiles")
COMPILERS = ("c++", "g++", "clang++")


def has_compiler() -> bool:
    return any(map(shutil.which, COMPILERS))


def compiled_library() -> ctypes.CDLL:
    if not has_compiler():
        pytest.skip("there is no C++ compiler")
    library = load_library()
    assert library is not None, "the compiler could not build the kernels; see the log"
    return library


def library_with_products() -> ctypes.CDLL:
    library = compiled_library()
    if not library.has_products():
        pytest.skip("a processor without bfloat16 products")
    return library


def library_with(products: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Make the library use one of `PRODUCTS` for all callers: all but `tiles` as on a processor without AMX."""
    library = library_with_products()
    if products == "dots" and library.use_floats(False):
        pytest.skip("a processor without bfloat16 dot products")
    if products == "tiles" and not library.use_tiles(True):
        pytest.skip("a processor without tiles")
    library.use_floats(products == "floats")
    if products != "tiles":
        library.use_tiles(False)
        capabilities = {**torch.cpu.get_capabilities(), "amx_bf16": False}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    return library


def library_for_vnni(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Return the kernels as compiled for processors that have AVX512_VNNI, and no instructions for bfloat16."""
    kind = next((kind for kind in processors("x86_64") if kind.name == "avx512-vnni"), None)
    assert kind is not None
    if not kind.fits(cpu_flags()):
        pytest.skip("a processor without AVX512_VNNI")
    monkeypatch.setattr("engine.native.cpu.build._NATIVE", kind.compiler_flags)
    library = library_with_products()
    assert library.use_floats(False), "it has no other products"
    return library
