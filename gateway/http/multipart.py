"""Stream a multipart upload to disk as it arrives.

The file part is written directly into the data directory and is never held in memory as a whole. The upload is refused
as soon as the file exceeds its limit. Knows multipart/form-data; does not know what the fields mean.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.files.disk import CHECK_BYTES, DiskReserve, noticing_full_disk
from gateway.protocol.errors import ApiError, invalid_request

MAX_FIELD_BYTES = 64 * 2**10  # maximum bytes of one field
MAX_FIELDS = 32
MAX_FORM_BYTES = 2**20  # maximum bytes of everything except the file: fields, headers, skipped parts

# A function that takes the fields before the file in the form, and returns the maximum bytes of the file.
Limit = Callable[[Mapping[str, str]], int]


@dataclass(slots=True)
class Upload:
    """The parts of one upload. `content` is the path of the received file; None if the form had no file.

    The route owns the upload. It moves the file to its final place, or deletes it with `discard`.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    content: Path | None = None
    size: int = 0

    def discard(self) -> None:
        if self.content is not None:
            self.content.unlink(missing_ok=True)


async def receive_upload(
    chunks: AsyncIterator[bytes],
    content_type: str,
    directory: Path,
    limit: Limit,
    too_large: Callable[[int], ApiError],
    disk: DiskReserve,
    on_content: Callable[[bytes], object] | None = None,
    file_field: str = "file",
) -> Upload:
    """Read a multipart form from `chunks`, write its part `file_field` into `directory`, and return the parts.

    `limit` takes the fields that came before the file in the form, and returns the maximum bytes of the file. Raises
    `too_large` of this maximum if the file is larger, `DiskFull` if `disk` has no room for it, and `ApiError` 400 if
    the form is invalid. No file is left on the disk after an error, or after the client hangs up.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise invalid_request("The request must be multipart/form-data.")
    form = _Form(directory, limit, too_large, disk, on_content, file_field)
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
        received = 0
        async for chunk in chunks:
            received += len(chunk)
            with noticing_full_disk():
                parser.write(chunk)
            if received - form.upload.size > MAX_FORM_BYTES:
                raise invalid_request("The form has too much data besides its file.")
        parser.finalize()
        if not form.is_complete:
            raise invalid_request("The multipart body ends in the middle.")
    except FormParserError as error:
        form.upload.discard()
        raise invalid_request("The body is not valid multipart/form-data.") from error
    except BaseException:
        form.upload.discard()
        raise
    finally:
        with suppress(OSError):  # of a full disk, which was noticed before
            form.close()
    return form.upload


class _Form:
    """The callbacks of the multipart parser.

    A part is the file (named `file_field`), a plain field, or another file. Other files are skipped.
    """

    def __init__(
        self,
        directory: Path,
        limit: Limit,
        too_large: Callable[[int], ApiError],
        disk: DiskReserve,
        on_content: Callable[[bytes], object] | None,
        file_field: str,
    ) -> None:
        self.upload = Upload()
        self.is_complete = False
        self._directory = directory
        self._limit = limit
        self._too_large = too_large
        self._disk = disk
        self._on_content = on_content
        self._file_field = file_field
        self._checked_bytes = 0  # of the file, when the disk was checked last
        self._max_bytes = 0
        self._output: BinaryIO | None = None
        self._header = [b"", b""]
        self._disposition = b""
        self._name = ""
        self._value: bytearray | None = None

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._extend_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._extend_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._write,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None

    def _begin(self) -> None:
        self._disposition = b""

    def _extend_header(self, which: int, piece: bytes) -> None:
        self._header[which] += piece

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == self._file_field and b"filename" in options and self.upload.content is None:
            self._max_bytes = self._limit(self.upload.fields)
            handle, path = tempfile.mkstemp(dir=self._directory)
            self._output = os.fdopen(handle, "wb")
            self.upload.content = Path(path)
            self.upload.filename = options[b"filename"].decode("utf-8", "replace")
        elif b"filename" not in options:
            if len(self.upload.fields) == MAX_FIELDS:
                raise invalid_request("The form has too many fields.")
            self._value = bytearray()

    def _write(self, data: bytes, start: int, end: int) -> None:
        if self._output is not None:
            self.upload.size += end - start
            if self.upload.size > self._max_bytes:
                raise self._too_large(self._max_bytes)
            if self.upload.size - self._checked_bytes >= CHECK_BYTES:
                self._checked_bytes = self.upload.size
                self._disk.check()
            self._output.write(data[start:end])
            if self._on_content is not None:
                self._on_content(data[start:end])
        elif self._value is not None:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                raise invalid_request(f"A field of the form is longer than {MAX_FIELD_BYTES} bytes.")

    def _end(self) -> None:
        if self._value is not None:
            self.upload.fields[self._name] = self._value.decode("utf-8", "replace")
            self._value = None
        self.close()

    def _complete(self) -> None:
        self.is_complete = True
