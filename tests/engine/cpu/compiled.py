"""The C++ kernels as tests want them: skipped where there is no compiler, and where there is one they have to build."""

import ctypes
import shutil

import pytest
import torch

from engine.cpu.build import load_library

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


def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AMX: where it has that, models are given oneDNN's products rather than ours."""
    capabilities = {**torch.cpu.get_capabilities(), "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
