"""Compile the C++ kernels for this processor once, and load them.

Knows compilers and files; does not know what the kernels compute. The library is kept in the user's cache directory.
Its file name has a hash of everything that the library depends on. Without a working compiler, a library is used that
was compiled before, for this kind of processor; without that, there is none, and the reason is logged.

    python -m engine.native.cpu.build        compiles one library for each kind of processor; Dockerfile does so
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from engine.native.cpu.processors import Processor, cpu_flags, processors
from engine.progress import NO_PROGRESS, Progress

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "decoder_layer.cpp", "sampling.cpp"))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_COMPILERS = ("c++", "g++", "clang++")
# Sums may be reordered, so that they can be vectorised; NaN and infinity keep their meaning. Jump threading is off: for
# an exponential with a clamped argument, it creates constants such as 1 / (1 + e^88), and masked lanes are multiplied
# by these constants, too. Such products are denormal, and Intel's processors take a hundred times as long for them.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-freciprocal-math",
    "-fno-signed-zeros",
    "-fno-thread-jumps",
)
_NATIVE = ("-march=native",)
_COMPILE_LIMIT_S = 120  # time limit per compiler call, seconds
# Fields of /proc/cpuinfo that never change on a machine. Other fields, such as the clock rate, do.
_CPU_MODEL_FIELDS = ("flags", "Features", "model name", "CPU part")


def load_library(progress: Progress = NO_PROGRESS) -> ctypes.CDLL | None:
    """Return the kernels' library; compile it first if it is not cached. Return None on failure and log the reason."""
    library = library_or_reason(progress)
    if isinstance(library, ctypes.CDLL):
        return library
    structlog.get_logger().warning("no CPU kernels", reason=library)
    return None


def library_or_reason(progress: Progress = NO_PROGRESS) -> ctypes.CDLL | str:
    """Return the kernels' library, or the reason why there is none."""
    try:
        return ctypes.CDLL(str(_built_for_this_machine(progress)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = next(iter(said.strip().splitlines()), type(error).__name__)
    for library in _prebuilt_libraries():
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:  # such as one that was linked with a newer C library
            reason = f"{reason}; {error}"
    return reason


def build_for_processors() -> list[Path]:
    """Compile a library for each kind of processor of this architecture; return the libraries' paths.

    They work in this Python environment, and in copies of it on other machines. Raises `OSError` without a compiler
    and `SubprocessError` if it fails.
    """
    compiler, openmp, directory = _find_compiler(), torch_openmp(), _prebuilt_directory()
    directory.mkdir(parents=True, exist_ok=True)
    return [
        _compile(compiler, processor.compiler_flags, openmp, _prebuilt_path(processor, openmp))
        for processor in processors(platform.machine())
    ]


def _built_for_this_machine(progress: Progress) -> Path:
    """Return the path of the library; compile it if it does not exist. Errors are those of `build_for_processors`."""
    compiler, openmp = _find_compiler(), torch_openmp()
    library = _cache_directory() / f"kernels-{_fingerprint(compiler, openmp)}.so"
    if library.exists():
        return library
    with progress.phase("compiling the CPU kernels"):
        return _compile(compiler, _NATIVE, openmp, library)


def _prebuilt_libraries() -> list[Path]:
    """Return the libraries of `build_for_processors` that this processor can run, the fastest first."""
    flags, openmp = cpu_flags(), torch_openmp()
    paths = [_prebuilt_path(processor, openmp) for processor in processors(platform.machine()) if processor.fits(flags)]
    return [path for path in paths if path.exists()]


def _prebuilt_path(processor: Processor, openmp: Path | None) -> Path:
    parts = [*_code(), *_FLAGS, *processor.compiler_flags, openmp.name if openmp else "", torch.__version__]
    return _prebuilt_directory() / f"kernels-{processor.name}-{_hash(parts)}.so"


def _prebuilt_directory() -> Path:
    return Path(sys.prefix) / "lib" / "tidegate"


def _find_compiler() -> str:
    """Return the path of a C++ compiler. Raises `FileNotFoundError` without one."""
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler ({', '.join(_COMPILERS)}) is on the PATH")
    return compiler


def _compile(compiler: str, target: Sequence[str], openmp: Path | None, library: Path) -> Path:
    """Compile the sources in parallel for `target`, and link them with torch's copy of OpenMP, if there is one.

    Return `library`, the path. With a second copy of OpenMP, the waiting threads of both copies would compete for the
    cores.
    """
    flags = [*_FLAGS, *target, *(["-fopenmp"] if openmp else [])]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch, ThreadPoolExecutor() as compilers:
        objects = [Path(scratch) / f"{source.stem}.o" for source in _SOURCES]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(compiled)]
            for source, compiled in zip(_SOURCES, objects, strict=True)
        ]
        list(compilers.map(_run, commands))
        linked = Path(scratch) / "kernels.so"
        _run([compiler, "-shared", *map(str, objects), "-o", str(linked), *([str(openmp)] if openmp else [])])
        linked.replace(library)  # atomic: another process may build the same library
    return library


def _run(command: list[str]) -> str:
    """Run `command` and return its standard output. Raises `SubprocessError` if it fails or takes too long."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
    return done.stdout


def torch_openmp() -> Path | None:
    """Return the path of the GNU OpenMP library in torch's wheel.

    Return None if the wheel has none; the kernels then use one thread.
    """
    directory = Path(torch.__file__).parent
    found = [*directory.glob("lib/libgomp*.so*"), *directory.parent.glob("torch.libs/libgomp*.so*")]
    return next(iter(found), None)


def _fingerprint(compiler: str, openmp: Path | None) -> str:
    """Return a hash of sources, compiler, flags, OpenMP, torch's version and the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    processor = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else platform.processor()
    cpu_model = [line for line in processor.splitlines() if line.startswith(_CPU_MODEL_FIELDS)]
    version = _run([compiler, "--version"])
    return _hash([*_code(), version, *_FLAGS, *_NATIVE, str(openmp), torch.__version__, *cpu_model])


def _code() -> list[str]:
    return [path.read_text() for path in (*_SOURCES, *_HEADERS)]


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_directory() -> Path:
    """Return tidegate's directory in the user's cache, or a temporary directory if the cache is not writable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="tidegate-"))


if __name__ == "__main__":
    for built in build_for_processors():
        print(built)
