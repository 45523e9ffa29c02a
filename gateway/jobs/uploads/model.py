"""An upload in parts, its limits, and the reasons for which a call about it is refused. Plain data."""

from dataclasses import dataclass
from typing import Any

MAX_UPLOAD_BYTES = 8 * 2**30  # as in OpenAI's API
MAX_PART_BYTES = 64 * 2**20  # as in OpenAI's API
MAX_PARTS = 10_000  # of one upload, as in S3's API
MAX_PENDING = 200  # uploads of one owner
LIFETIME_S = 3600  # seconds until an upload that is not completed expires, as in OpenAI's API

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"


@dataclass(frozen=True, slots=True)
class Upload:
    """The record of an upload. Times are Unix seconds.

    `bytes` is the announced size of the whole file. `owner` is the name of the API key that created the upload (None:
    access was open). `file_expires_after_s` is what the file gets when it is complete (None: it never expires).
    """

    id: str
    bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    owner: str | None = None
    file_expires_after_s: int | None = None

    @property
    def file_id(self) -> str:
        """The id of the file that the parts become. A completion that is repeated after a crash replaces the file."""
        return f"file-{self.id.removeprefix('upload_')}"

    @property
    def max_received_bytes(self) -> int:
        """The most bytes of all its parts. Clients send a part again if they have lost the answer."""
        return 2 * self.bytes + MAX_PART_BYTES

    def to_json(self, status: str, file: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return OpenAI's `upload` object. `file` is the finished file as OpenAI's `file` object."""
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": status,
            "file": file,
        }


@dataclass(frozen=True, slots=True)
class Part:
    id: str
    upload_id: str
    created_at: int

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "upload.part",
            "created_at": self.created_at,
            "upload_id": self.upload_id,
        }


class NoSuchUpload(Exception):
    """The caller has no upload with this id."""


class TooManyUploads(Exception):
    """The owner has as many pending uploads as one may have."""


class UploadRefused(Exception):
    """The call is refused. The message is a sentence for the client; `param` is the parameter that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
