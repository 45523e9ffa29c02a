"""The library is built once per processor, and the engine works without it."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.native.cpu import build
from engine.native.cpu.build import load_library
from tests.engine.native.cpu.compiled import compiled_library


def test_a_library_is_built_once_and_found_again_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses a small library, because the kernels take seconds to compile."""
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCES", (source,))
    monkeypatch.setattr(build, "_HEADERS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled_library().answer() == 1
    (built,) = (tmp_path / "tidegate").iterdir()
    before = built.stat().st_mtime_ns
    assert compiled_library().answer() == 1
    assert [path.stat().st_mtime_ns for path in (tmp_path / "tidegate").iterdir()] == [before]
    source.write_text('extern "C" int answer() { return 2; }\n')
    assert compiled_library().answer() == 2
    assert len(list((tmp_path / "tidegate").iterdir())) == 2


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
