"""A storage in an object store or another place that fsspec knows: S3, GCS, Azure, WebDAV, memory.

Objects cannot grow, so each append makes an object of its own, `<name>/<position>`. Local copies of inputs and results
are in a directory of this machine while a batch runs here. Calls block, so they run in threads of their own: a storage
that hangs holds up nothing else. Credentials and other options come from the provider's usual variables, or from
fsspec's (`FSSPEC_S3_ENDPOINT_URL`, or a file in ~/.config/fsspec).
"""

import asyncio
import math
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from gateway.files.disk import is_disk_full
from gateway.files.local_storage import PRIVATE_DIR, LocalStorage, local_entries, move_durably, sha256_of, unlink
from gateway.files.storage import ContentDamaged, ContentLost, Entry, Storage, StorageUnreachable

T = TypeVar("T")

CALL_S = 20.0  # seconds for a call without the transfer of its bytes
MIN_BYTES_PER_S = 2**20  # a transfer that is slower is given up and tried again
THREADS = 16
PART_BYTES = 8 * 2**20  # bytes of a multipart upload that are in memory at once
READ_BYTES = 2**20  # bytes of a download that are in memory at once
FETCHES = 4  # appended pieces that are fetched at the same time
# S3's client waits for minutes, and its calls cannot be cancelled. Callers of a storage try again themselves.
S3_CONFIG = {"connect_timeout": 4, "read_timeout": 9, "retries": {"total_max_attempts": 1}}
S3_TRIES = 2
# What the file systems of fsspec call the time of an object's last change: S3, Azure, most others, GCS, memory.
MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "created")


class BadStorageUrl(Exception):
    """The URL of the storage cannot be used. The message is one sentence for the operator."""


def open_storage(url: str | None, data_dir: Path) -> Storage:
    """Return the storage at `url`, or in `data_dir` if there is no URL. Raises `BadStorageUrl`.

    `data_dir` is the directory in which a storage that is elsewhere keeps its local copies.
    """
    if url is None:
        return LocalStorage(data_dir)
    parts = urlsplit(url)
    if parts.scheme not in ("", "local", "file"):
        return ObjectStorage(url, data_dir)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise BadStorageUrl(f"--files-url {url}: a directory is written file:///path, a bucket s3://bucket/prefix.")
    return LocalStorage(Path(unquote(parts.path)))


class ObjectStorage:
    collect_s = 2.0  # results of so many seconds share an object; a crash loses at most these

    def __init__(self, url: str, directory: Path) -> None:
        self.directory = directory
        self.place = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        self._files, self._root = _file_system(url)
        self._threads = ThreadPoolExecutor(THREADS, "storage")

    async def put(self, source: Path, name: str) -> None:
        size = source.stat().st_size
        await self._call(_upload, self._files, source, self._at(name), size=size)
        await asyncio.to_thread(source.unlink, missing_ok=True)

    async def get(self, name: str) -> bytes | None:
        try:
            data: bytes = await self._call(self._files.cat_file, self._at(name), lost=name)
        except ContentLost:
            return None
        return data

    async def set(self, name: str, data: bytes) -> None:
        await self._call(self._files.pipe_file, self._at(name), data, size=len(data))

    async def copy(self, source: str, name: str) -> None:
        await self._call(self._files.cp_file, self._at(source), self._at(name), lost=source)

    async def append(self, name: str, position: int, data: bytes) -> None:
        path = f"{self._at(name)}/{position:015d}"
        await self._call(self._files.pipe_file, path, data, size=len(data))

    async def fetch(self, name: str, sha256: str | None = None) -> Path:
        target = self.directory / name
        if not await asyncio.to_thread(target.exists):
            info = await self._call(self._files.info, self._at(name), lost=name)
            await self._call(_download, self._files, self._at(name), target, sha256, size=info["size"], lost=name)
        return target

    async def fetch_appended(self, name: str, size: int) -> Path:
        target = self.directory / name
        pieces = _chain(name, await self._find(name), size)
        target.parent.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
        await asyncio.to_thread(target.touch, 0o600)
        for first in range(0, len(pieces), FETCHES):
            group = pieces[first : first + FETCHES]
            fetching = [asyncio.create_task(self._fetch_piece(name, piece, target)) for piece in group]
            try:
                await asyncio.gather(*fetching)
            finally:
                for task in fetching:
                    task.cancel()
        return target

    def path(self, name: str) -> None:
        return None

    async def read(self, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        for position in range(start, end, READ_BYTES):
            stop = min(end, position + READ_BYTES)
            get = partial(self._files.cat_file, start=position, end=stop)
            chunk = await self._call(get, self._at(name), size=stop - position, lost=name)
            if len(chunk) != stop - position:
                raise ContentLost(f"{name} ends at byte {position + len(chunk)}")
            yield chunk

    async def remove(self, names: Sequence[str]) -> None:
        await asyncio.to_thread(unlink, [self.directory / name for name in names])
        await self._call(_remove, self._files, [self._at(name) for name in names])

    async def remove_folder(self, name: str) -> None:
        try:
            found = await self._find(name)
            await self._call(_remove, self._files, [f"{self._at(name)}/{rest}" for rest in found])
        finally:
            await asyncio.to_thread(shutil.rmtree, self.directory / name, ignore_errors=True)

    async def entries(self, folder: str) -> list[Entry]:
        """Return the entries directly in `folder`, also those of which only a local copy is left."""
        local = await asyncio.to_thread(local_entries, self.directory / folder)
        modified = {entry.name: entry.modified_s for entry in local}
        for rest, info in (await self._find(folder)).items():
            name = rest.partition("/")[0]
            modified[name] = max(modified.get(name, 0.0), _modified_s(info))
        return [Entry(name, modified_s) for name, modified_s in modified.items()]

    async def _find(self, name: str) -> dict[str, dict[str, Any]]:
        """Return what is known of each object below `name`, by the rest of its name."""
        prefix = f"{self._at(name)}/"
        found = await self._call(partial(_find, self._files), prefix.rstrip("/"))
        return {path.removeprefix(prefix): info for path, info in found.items() if path.startswith(prefix)}

    async def _fetch_piece(self, name: str, piece: "_Piece", target: Path) -> None:
        data = await self._call(self._files.cat_file, f"{self._at(name)}/{piece.name}", size=piece.size, lost=name)
        if len(data) != piece.size:
            raise ContentLost(f"{name}/{piece.name} has {len(data)} bytes instead of {piece.size}")
        await asyncio.to_thread(_write_at, target, int(piece.name), data)

    async def _call(self, function: Callable[..., T], *args: Any, size: int = 0, lost: str | None = None) -> T:
        """Return `function(*args)`, which runs in a thread and may transfer `size` bytes.

        Raises `ContentLost` if `lost` is given, the name of the content that is read, and it does not exist. Raises
        `StorageUnreachable` for every other error, except a full disk of this machine.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_S + size / MIN_BYTES_PER_S):
                return await loop.run_in_executor(self._threads, partial(function, *args))
        except ContentLost:
            raise
        except Exception as error:
            if lost is not None and isinstance(error, FileNotFoundError):
                raise ContentLost(f"{lost} is missing") from None
            if is_disk_full(error):
                raise
            raise StorageUnreachable(f"the file storage does not answer: {repr(error)[:300]}") from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str  # its position
    size: int


def _chain(name: str, found: Mapping[str, Mapping[str, Any]], size: int) -> list[_Piece]:
    """Return the pieces that follow one another from position 0 to `size`. Raises `ContentLost`."""
    sizes = {int(piece): int(info["size"]) for piece, info in found.items() if piece.isdigit()}
    pieces, position = [], 0
    while position < size:
        if not sizes.get(position):
            raise ContentLost(f"{name} has no piece at byte {position}")
        pieces.append(_Piece(f"{position:015d}", sizes[position]))
        position += sizes[position]
    if position != size:
        raise ContentLost(f"{name} has a piece that ends at byte {position} instead of {size}")
    return pieces


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path of the URL in it."""
    try:
        import fsspec
    except ImportError:
        raise BadStorageUrl("--files-url needs fsspec: install tidegate[storage].") from None
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {"use_listings_cache": False}  # other gateways write, too
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = S3_CONFIG | fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
    try:
        files, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise BadStorageUrl(f"--files-url {url}: {error}") from None
    if "config_kwargs" in options:
        files.retries = S3_TRIES
    return files, root.rstrip("/")


def _upload(files: Any, source: Path, path: str) -> None:
    """Write the file `source` to `path`. The object appears when it is complete, and not after an error."""
    with source.open("rb") as content:
        target = files.open(path, "wb", block_size=PART_BYTES)
        try:
            shutil.copyfileobj(content, target, PART_BYTES)
        except BaseException:
            target.discard()
            raise
        target.close()


def _download(files: Any, path: str, target: Path, sha256: str | None) -> None:
    target.parent.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    partial_copy = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
    try:
        files.get_file(path, str(partial_copy))
        if sha256 is not None and sha256_of(partial_copy) != sha256:
            raise ContentDamaged(f"{target.name} does not match its checksum")
        move_durably(partial_copy, target)  # it is not checked again when a later start finds it
    finally:
        partial_copy.unlink(missing_ok=True)


def _write_at(target: Path, position: int, data: bytes) -> None:
    """Write into the file `target`. It is opened here, because the thread may outlive the call that waits for it."""
    with target.open("r+b") as file:
        file.seek(position)
        file.write(data)


def _find(files: Any, path: str) -> dict[str, dict[str, Any]]:
    try:
        found: dict[str, dict[str, Any]] = files.find(path, detail=True)
    except FileNotFoundError:
        return {}
    return found


def _remove(files: Any, paths: Sequence[str]) -> None:
    if len(paths) > 1:
        with suppress(FileNotFoundError):  # one of them may be gone already
            return files.rm(list(paths))  # type: ignore[no-any-return]
    for path in paths:
        with suppress(FileNotFoundError):
            files.rm_file(path)


def _modified_s(info: Mapping[str, Any]) -> float:
    """Return when an object was last written, in Unix seconds. If the file system does not tell, it counts as new."""
    value = next((info[key] for key in MODIFIED if info.get(key)), math.inf)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)
