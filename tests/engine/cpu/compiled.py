"""The C++ kernels as tests want them: skipped where there is no compiler, and where there is one they have to build."""

import ctypes
import shutil

import pytest

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
