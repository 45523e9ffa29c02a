"""The library is built once per processor, or ahead of time for kinds of them, and the engine works without it."""

import ctypes
import platform
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.native.cpu import build
from engine.native.cpu.build import build_for_processors, library_or_reason, load_library
from engine.native.cpu.processors import Processor, cpu_flags, processors
from tests.engine.native.cpu.compiled import compiled_library, has_compiler

ANY = Processor("any", ("-O1",))
FASTER = Processor("faster", ("-O2",))
UNKNOWN = Processor("unknown", ("-O3",), frozenset({"no-such-flag"}))
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a small library, because the kernels take seconds to compile; its environment is `tmp_path`."""
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCES", (source,))
    monkeypatch.setattr(build, "_HEADERS", ())
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return source


def test_a_library_is_built_once_and_found_again_until_its_source_changes(source: Path, tmp_path: Path) -> None:
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


@needs_compiler
def test_a_machine_without_a_compiler_uses_the_fastest_library_that_was_built_for_its_kind(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (UNKNOWN, FASTER, ANY)
    monkeypatch.setattr(build, "processors", lambda machine: kinds)
    built = build_for_processors()
    assert [path.name.split("-")[1] for path in built] == ["unknown", "faster", "any"]
    library = library_or_reason()
    assert isinstance(library, ctypes.CDLL) and Path(library._name) not in built, "it compiles for its own processor"
    monkeypatch.setenv("PATH", "")
    library = library_or_reason()
    assert isinstance(library, ctypes.CDLL) and library._name == str(built[1]) and library.answer() == 1
    source.write_text('extern "C" int answer() { return 2; }\n')
    assert "no C++ compiler" in str(library_or_reason()), "none of these sources"
    kinds = (UNKNOWN,)
    assert "no C++ compiler" in str(library_or_reason())


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_a_reason_and_not_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "processors", lambda machine: (FASTER, ANY))
    faster, slower = build_for_processors()
    faster.write_bytes(b"not a library")
    slower_code = slower.read_bytes()
    slower.write_bytes(b"not a library")
    monkeypatch.setenv("PATH", "")
    reason = str(library_or_reason())
    assert "no C++ compiler" in reason and faster.name in reason and slower.name in reason
    slower.write_bytes(slower_code)
    library = library_or_reason()
    assert isinstance(library, ctypes.CDLL) and library._name == str(slower)


def test_the_flags_of_a_processor_are_those_that_linux_says(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2\nbugs\t: x\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(cpuinfo) == {"fpu", "avx2"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(cpuinfo) == cpu_flags(tmp_path / "missing") == frozenset()


def test_each_kind_of_processor_has_all_that_slower_kinds_need() -> None:
    kinds = processors("x86_64")
    assert all(faster.needs > slower.needs for faster, slower in zip(kinds, kinds[1:], strict=False))
    assert not any(kind.fits(frozenset()) for kind in kinds)
    assert processors("another") == ()


@needs_compiler
@pytest.mark.skipif(not processors(platform.machine()), reason="no kinds of this architecture are known")
def test_the_compiler_knows_the_flags_of_every_kind(source: Path) -> None:
    assert all(path.exists() for path in build_for_processors())
