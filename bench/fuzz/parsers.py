"""The gateway's parsers as a fuzzer calls them: with any bytes. What a client would see as a 500 is an exception.

Knows the parsers and the errors that they may raise; does not know where the bytes come from.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from gateway.dialects.responses.request import parse_response_request
from gateway.files.disk import DiskReserve
from gateway.http.multipart import receive_upload
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest, parse_generation
from gateway.protocol.errors import ApiError, too_large
from gateway.protocol.json_body import parse_json_object

BOUNDARY = b"XX"
MAX_FILE_BYTES = 64


def read_json(data: bytes) -> None:
    """Read `data` as the body of each endpoint."""
    for interpret in (
        partial(parse_generation, ChatCompletionRequest),
        partial(parse_generation, CompletionRequest),
        parse_response_request,
    ):
        try:
            interpret(parse_json_object(data))
        except ApiError as error:
            if error.status >= 500:
                raise


def read_form(data: bytes) -> None:
    """Read `data` as an upload that arrives in pieces; its first byte is their size. No file may be left behind."""
    size = 1 + (data[0] if data else 0)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(1, len(data), size):
            yield data[start : start + size]

    with tempfile.TemporaryDirectory() as folder:
        try:
            kind, disk = f"multipart/form-data; boundary={BOUNDARY.decode()}", DiskReserve(Path(folder), 0)
            limits = (lambda fields: MAX_FILE_BYTES), too_large
            upload = asyncio.run(receive_upload(pieces(), kind, Path(folder), *limits, disk))
            assert upload.size <= MAX_FILE_BYTES
            upload.discard()
        except ApiError:
            pass
        left = list(Path(folder).iterdir())
        assert not left, f"{len(left)} files are left"


PARSERS: dict[str, Callable[[bytes], None]] = {"json": read_json, "multipart": read_form}
