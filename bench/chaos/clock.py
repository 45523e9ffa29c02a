"""Wall clocks of single processes that can be set, while their monotonic clocks stay true, as on a real machine.

A Python part reads its offset from a file (`injected/sitecustomize.py`); the store does the same by the library
libfaketime, where it is installed. Under libfaketime, `time.sleep` of Python fails.
"""

from collections.abc import Mapping
from pathlib import Path

from loadtest.machine import python_path

INJECTED = Path(__file__).parent / "injected"
# Where Debian's package `libfaketime` and its likes put the library.
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
)


class Clocks:
    """The clocks of the parts, as offsets in files of `folder`. `library` is libfaketime's, if it is elsewhere."""

    def __init__(self, folder: Path, library: Path | None = None) -> None:
        self._folder = folder
        paths = [library] if library is not None else [Path(path) for path in LIBRARIES]
        self.library = next((path for path in paths if path.exists()), None)

    def env_of_python(self, part: str, source: Path | None = None) -> Mapping[str, str]:
        """Return the environment of a part that runs from the tree `source`; None: from this one."""
        return {"TIDEGATE_CHAOS_CLOCK": str(self._file(part)), "PYTHONPATH": f"{INJECTED}:{source or python_path()}"}

    def env_of_store(self, part: str) -> Mapping[str, str]:
        if self.library is None:
            return {}
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(part)),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set(self, part: str, offset_s: float) -> None:
        """Set the clock of a part to `offset_s` seconds after the true time."""
        draft = self._file(part, must_exist=False).with_suffix(".draft")
        draft.write_text(f"{offset_s:+.0f}s\n")
        draft.replace(self._file(part, must_exist=False))

    def _file(self, part: str, must_exist: bool = True) -> Path:
        path = self._folder / f"{part}.clock"
        if must_exist and not path.exists():
            self.set(part, 0)
        return path
