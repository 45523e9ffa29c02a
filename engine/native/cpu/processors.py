"""Kinds of processors for which the C++ kernels can be compiled ahead of time.

Knows compiler flags and what Linux says of a processor; does not know the kernels. A machine with a compiler needs no
kinds: it compiles for its own processor.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# The flags of Linux for levels 3 and 4 of the x86-64 psABI; `abm` is its name for lzcnt.
_LEVEL_3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_LEVEL_4 = _LEVEL_3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Processor:
    """One kind of processor: every processor with the flags `needs` in /proc/cpuinfo runs what is compiled for it."""

    name: str
    compiler_flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()

    def fits(self, flags: Collection[str]) -> bool:
        """Return whether a processor with `flags` is of this kind."""
        return self.needs.issubset(flags)


_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_BF16_NEEDS = _LEVEL_4 | {"avx512_bf16", "avx512_vnni"}
_PROCESSORS = {
    "x86_64": (
        Processor("amx", (*_BF16, "-mamx-tile", "-mamx-bf16"), _BF16_NEEDS | {"amx_tile", "amx_bf16"}),
        Processor("avx512-bf16", _BF16, _BF16_NEEDS),
        Processor("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _LEVEL_4 | {"avx512_vnni"}),
        Processor("avx512", ("-march=x86-64-v4",), _LEVEL_4),
        Processor("avx2", ("-march=x86-64-v3",), _LEVEL_3),
    ),
    "aarch64": (Processor("armv8", ("-march=armv8-a",)),),
}


def processors(machine: str) -> tuple[Processor, ...]:
    """Return the kinds of the architecture `machine`, the fastest first; none of an unknown architecture."""
    return _PROCESSORS.get(machine, ())


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first processor, or none where Linux does not say them (other systems, other names)."""
    if not cpuinfo.exists():
        return frozenset()
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    return frozenset(next((flags for name, _, flags in lines if name.strip() == "flags"), "").split())
