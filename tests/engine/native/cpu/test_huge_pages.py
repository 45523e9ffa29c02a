"""Weights in huge pages: the numbers are the same, one behind another, and each where a cache line begins."""

import mmap

import pytest
import torch

from engine.native.cpu.huge_pages import REGION, HugePages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.uint8])
def test_tensors_are_kept_as_they_are(dtype: torch.dtype) -> None:
    pages, rows = HugePages(), torch.arange(24).to(dtype).view(4, 6)
    tensors = [rows, rows.t(), rows[1:, ::2], rows[0, :1]]
    kept = [pages.keep(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, kept, strict=True):
        assert torch.equal(copy, tensor) and copy.dtype is dtype
        assert copy.is_contiguous() and copy.data_ptr() % 64 == 0
    assert len({copy.untyped_storage().data_ptr() for copy in kept}) == 1, "one region"


def test_what_does_not_fit_begins_another_region() -> None:
    pages, large = HugePages(), torch.arange(REGION // 4 + 5, dtype=torch.int32)
    kept = [pages.keep(tensor) for tensor in (large[:5], large, large[:7], large[: REGION // 4])]
    assert all(torch.equal(copy, large[: len(copy)]) for copy in kept)
    assert len({copy.untyped_storage().data_ptr() for copy in kept}) == 4


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_the_system_is_asked_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Seen(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            asked.append(advice)
            super().madvise(*advice)

    monkeypatch.setattr(mmap, "mmap", Seen)
    HugePages().keep(torch.arange(5))
    assert asked == [(mmap.MADV_HUGEPAGE,)]


def test_a_system_without_huge_pages_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert HugePages().keep(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
