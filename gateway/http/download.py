"""Send a content that is not on this machine's disk: as a stream, whole or one range of it.

Contents on the disk are sent by Starlette's `FileResponse`, with sendfile and its own reading of ranges.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import PureWindowsPath
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.fairness import UnderWay
from gateway.files.storage import ContentDamaged, Storage
from gateway.files.store import StoredFile
from gateway.protocol.errors import too_many_downloads

MAX_DOWNLOADS, MAX_DOWNLOADS_OF_KEY = 64, 16  # at once; each has up to three pieces of a content in memory
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)  # no file has a size with more digits


async def stored_content(
    request: Request, downloads: UnderWay, storage: Storage, name: str, file: StoredFile, media_type: str
) -> Response:
    """Return the response that sends the content `name` of `file`.

    Raises `ContentLost` if it does not exist, and `ApiError` 503 if there are too many `downloads`.

    The end of a whole file is sent only if the file matches its checksum, so a client notices a damaged one by its
    length.
    """
    etag = f'"{file.sha256}"'
    headers = {
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=utf-8''{quote(saved_name(file), safe='')}",
        "etag": etag,
    }
    wanted = request.headers.get("range") if request.headers.get("if-range", etag) == etag else None
    span = None if wanted is None else _span(wanted, file.bytes)
    if span is not None and span.start >= span.stop:
        return Response(status_code=416, headers={"content-range": f"bytes */{file.bytes}"})
    start, stop = (0, file.bytes) if span is None else (span.start, span.stop)
    if span is not None:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{file.bytes}"
    status = 200 if span is None else 206
    headers["content-length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    if downloads.is_full(file.owner):
        raise too_many_downloads()
    chunks = storage.read(name, start, stop)
    if span is None and file.sha256 is not None:
        chunks = _checked(chunks, file.sha256)
    end = downloads.begin(file.owner)
    try:
        first = await anext(chunks, b"")  # an error before the first byte still becomes an answer
    except BaseException:
        end()
        raise
    return Download(_rest(first, chunks), status, headers, media_type, end)


def forget_unread_range(request: Request, size: int) -> None:
    """Remove a `Range` header that does not name one range: the whole content is sent, as `stored_content` does.

    Starlette would answer some of them with a plain text.
    """
    if _span(request.headers.get("range", ""), size) is None:
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]


def saved_name(file: StoredFile) -> str:
    """Return the name under which clients may save `file`: the last part of what may be a path (RFC 6266, 4.3)."""
    name = PureWindowsPath(file.filename).name  # knows both kinds of slashes
    return name if name.strip(". ") else file.id


class Download(StreamingResponse):
    """Calls `on_end` when the content was sent, or when the client has hung up."""

    def __init__(
        self,
        content: AsyncIterator[bytes],
        status: int,
        headers: dict[str, str],
        media_type: str,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(content, status, headers, media_type)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _span(wanted: str, size: int) -> range | None:
    """Return the bytes that a `Range` header names, none of them if it is beyond the end.

    Return None for several ranges, other units and nonsense: then the whole content is sent, which HTTP allows.
    """
    found = _RANGE.fullmatch(wanted.replace(" ", ""))
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)


async def _checked(chunks: AsyncIterator[bytes], sha256: str) -> AsyncIterator[bytes]:
    """Yield `chunks`, each when the next one is there, and the last one when the checksum is right."""
    digest, held = hashlib.sha256(), b""
    async for chunk in chunks:
        await asyncio.to_thread(digest.update, chunk)
        if held:
            yield held
        held = chunk
    if digest.hexdigest() != sha256:
        raise ContentDamaged("a download does not match its checksum")
    yield held


async def _rest(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk
