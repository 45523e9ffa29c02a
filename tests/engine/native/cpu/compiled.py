"""The C++ kernels as tests want them: skipped where there is no compiler, and where there is one they have to build."""

import ctypes
import shutil

import pytest
import torch

from engine.native.cpu.build import load_library

COMPILERS = ("c++", "g++", "clang++")


def has_compiler() -> bool:
    return any(map(shutil.which, COMPILERS))


def compiled_library() -> ctypes.CDLL:
    if not has_compiler():
        pytest.skip("there is no C++ compiler")
    library = load_library()
    assert library is not None, "there is a compiler, and it did not build the kernels"
    return library


def library_with_products() -> ctypes.CDLL:
    library = compiled_library()
    if not library.has_products():
        pytest.skip("a processor without bfloat16 products")
    return library


def library_with(products: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """It makes its products by `tiles`, or by `dots` as on a processor without AMX, whatever asks for products."""
    library = library_with_products()
    if products == "tiles" and not library.use_tiles(True):
        pytest.skip("a processor without tiles")
    if products == "dots":
        library.use_tiles(False)
        capabilities = {**torch.cpu.get_capabilities(), "amx_bf16": False}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    return library
