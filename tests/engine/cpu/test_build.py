"""The library is built once for a processor, and its absence is no failure."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.cpu.build import load_library


def test_a_library_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if load_library() is None:
        pytest.skip("there is no C++ compiler")
    (built,) = (tmp_path / "tidegate").iterdir()
    before = built.stat().st_mtime_ns
    assert load_library() is not None
    assert [path.stat().st_mtime_ns for path in (tmp_path / "tidegate").iterdir()] == [before]


def test_without_a_compiler_there_is_no_library_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with capture_logs() as logs:
        assert load_library() is None
    assert "no C++ compiler" in logs[0]["reason"]


def test_a_compiler_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such target' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with capture_logs() as logs:
        assert load_library() is None
    assert logs[0]["reason"] == "no such target"
