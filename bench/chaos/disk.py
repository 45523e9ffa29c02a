"""Disks of single processes that can be slow or full. A library does it that the processes preload (`injected/disk.c`).

It is compiled at the start of a run. Knows processes' environments; does not know what they write.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench.chaos.clock import INJECTED

COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 60.0


class Disks:
    """The disks of the parts, whose states are in files of `folder`.

    `library` is None where there is no C compiler, or not Linux's way to preload libraries. All disks are good then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.library = compiled(folder / "disk.so")

    def env(self, part: str, data_dir: Path) -> Mapping[str, str]:
        """Return the environment in which a part has its own disk for the files below `data_dir`."""
        if self.library is None:
            return {}
        return {
            "LD_PRELOAD": str(self.library),
            "TIDEGATE_CHAOS_DISK": str(self._file(part)),
            "TIDEGATE_CHAOS_FOLDER": str(data_dir.resolve()),
        }

    def set(self, part: str, *, sync_s: float = 0.0, is_full: bool = False) -> None:
        """Let each sync of a part's files take `sync_s` seconds, or refuse each write; without arguments, neither."""
        draft = self._file(part).with_suffix(".draft")
        draft.write_text(f"{sync_s:.3f} {is_full:d}\n")
        draft.replace(self._file(part))

    def _file(self, part: str) -> Path:
        return self._folder / f"{part}.disk"


def compiled(library: Path) -> Path | None:
    """Compile the library. Return its path; None if this machine cannot."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None or not Path("/proc/self/fd").exists():
        return None
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(INJECTED / "disk.c"), "-ldl"]
    done = subprocess.run(command, capture_output=True, timeout=COMPILE_LIMIT_S)
    return library if done.returncode == 0 else None
