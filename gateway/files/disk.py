"""The free space of the data directory's disk, of which uploads and batches leave a reserve.

The embedded store writes its log to the same disk, and without a log it takes no writes: no request could be served.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECK_BYTES = 8 * 2**20  # an upload checks the disk again after so many bytes
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class DiskFull(Exception):
    """The disk of the data directory has no space that may be used."""

    def __init__(self) -> None:
        super().__init__("no more than the reserve of the disk is free")


class DiskReserve:
    """The free space that uploads and new batches must leave, and results half of it, in bytes (0: none)."""

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._reserve_bytes = reserve_bytes

    def check(self, more_bytes: int = 0) -> None:
        """Raise `DiskFull` if less than the reserve would be free after `more_bytes` were written."""
        self._leave(self._reserve_bytes, more_bytes)

    def check_results(self, more_bytes: int) -> None:
        """Raise `DiskFull` if results of `more_bytes` would take more than half of the reserve.

        Batches that were accepted may use that half; the other half is for the store alone.
        """
        self._leave(self._reserve_bytes // 2, more_bytes)

    def _leave(self, reserve_bytes: int, more_bytes: int) -> None:
        if reserve_bytes and shutil.disk_usage(self._directory).free - more_bytes < reserve_bytes:
            raise DiskFull


def is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _FULL)


@contextmanager
def noticing_full_disk() -> Iterator[None]:
    """Raise `DiskFull` instead of the errors that writing to a full disk causes within the block."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull from error
        raise
