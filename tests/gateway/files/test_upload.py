"""Uploads that are too large, incomplete or malformed get a clear error and leave no file behind."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.files.disk import DiskReserve
from gateway.http.multipart import MAX_FORM_BYTES, receive_upload
from gateway.protocol.errors import ApiError, too_large
from gateway.routes.jobs import files as routes
from tests.gateway.offline import OfflineGateway, make_gateway

FORM = "multipart/form-data; boundary=XX"


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    gateway = make_gateway(redis_client, tmp_path)
    yield gateway
    await gateway.http.aclose()


def left_over(gateway: OfflineGateway) -> list[Path]:
    return [p for name in ("files", "incoming") for p in (gateway.files.data_dir / name).iterdir()]


def form(*parts: tuple[str, str | None, bytes], end: bytes = b"--XX--\r\n") -> bytes:
    """Return a multipart body of parts (name, filename, content)."""
    body = b""
    for name, filename, content in parts:
        disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename is not None else "")
        body += b"--XX\r\nContent-Disposition: " + disposition.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + end


PURPOSE = ("purpose", None, b"batch")
FILE = ("file", "in.jsonl", b"{}")
ANCHOR = ("expires_after[anchor]", None, b"created_at")


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([FILE], "purpose"),
        ([("purpose", None, b"cats"), FILE], "purpose"),
        ([("purpose", None, b"batch_output"), FILE], "purpose"),
        ([PURPOSE], "file"),
        ([PURPOSE, ("file", None, b"{}")], "file"),
        ([PURPOSE, ("document", "in.jsonl", b"{}")], "file"),
        ([PURPOSE, ("file", "in.json", b"{}")], "file"),
        ([PURPOSE, FILE, ANCHOR], "expires_after[seconds]"),
        ([PURPOSE, FILE, ("expires_after[seconds]", None, b"3600")], "expires_after[anchor]"),
        ([PURPOSE, FILE, ANCHOR, ("expires_after[seconds]", None, b"3599")], "expires_after[seconds]"),
        ([PURPOSE, FILE, ANCHOR, ("expires_after[seconds]", None, b"2592001")], "expires_after[seconds]"),
        ([PURPOSE, FILE, ANCHOR, ("expires_after[seconds]", None, b"soon")], "expires_after[seconds]"),
    ],
)
async def test_wrong_fields(gateway: OfflineGateway, parts: list[Any], param: str) -> None:
    answer = await gateway.http.post("/v1/files", content=form(*parts), headers={"content-type": FORM})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert left_over(gateway) == []


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", form(PURPOSE, FILE)),
        ("", b""),
        (FORM, b""),
        (FORM, b"{}"),
        (FORM, form(PURPOSE, FILE, end=b"")),
        (FORM, form(PURPOSE, FILE)[:-20]),
        (FORM, form(PURPOSE, ("file", "in.jsonl", b"{}"), end=b"--XX\r\nbroken header\r\n\r\n")),
        (FORM, form(*[(f"f{n}", None, b"") for n in range(40)])),
        (FORM, form(("n" * 3000, None, b"x" * 70_000), FILE)),
    ],
)
async def test_malformed_bodies(gateway: OfflineGateway, content_type: str, body: bytes) -> None:
    answer = await gateway.http.post("/v1/files", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert left_over(gateway) == [] and len(answer.content) < 500, "a long name is not repeated"


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", 3_000_000)
    monkeypatch.setattr(routes, "MAX_BATCH_BYTES", 1_000_000)
    yield


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("purpose", "size", "status"),
    [
        (b"batch", 1_000_000, 200),
        (b"batch", 1_000_001, 413),
        (b"user_data", 3_000_000, 200),
        (b"user_data", 3_000_001, 413),
        (b"user_data", 9_000_000, 413),
    ],
)
async def test_size_limits(gateway: OfflineGateway, purpose: bytes, size: int, status: int) -> None:
    parts = ("purpose", None, purpose), ("file", "in.jsonl", b"x" * size)
    for body in (form(*parts), form(*parts[::-1])):  # the purpose may come last
        answer = await gateway.http.post("/v1/files", content=body, headers={"content-type": FORM})
        assert answer.status_code == status
        if status == 413:
            assert answer.json()["error"]["message"] == f"The file is larger than {1 if purpose == b'batch' else 3} MB."
            assert left_over(gateway) == []


async def test_skipped_parts_have_a_limit_too(tmp_path: Path) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield form(FILE, ("other", "x", b""), end=b"")[:-2]
        while True:
            sent += 65_536
            yield b"x" * 65_536

    with pytest.raises(ApiError, match="besides its file"):
        await receive_upload(endless(), FORM, tmp_path, lambda _: 100, too_large, DiskReserve(tmp_path, 0))
    assert sent <= MAX_FORM_BYTES + 65_536 and list(tmp_path.iterdir()) == []


async def test_a_client_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    async def interrupted() -> AsyncIterator[bytes]:
        yield form(FILE, end=b"")[:-3]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await receive_upload(interrupted(), FORM, tmp_path, lambda _: 100, too_large, DiskReserve(tmp_path, 0))
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60)
@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 600), max_size=6), salt=st.booleans())
async def test_the_split_into_chunks_does_not_matter(
    tmp_path: Path, content: bytes, cuts: list[int], salt: bool
) -> None:
    content = content.replace(b"--XX", b"") + (b"\r\n--X" if salt else b"")
    body = form(PURPOSE, ("file", "in.jsonl", content))
    edges = [0, *sorted(min(c, len(body)) for c in cuts), len(body)]

    async def chunks() -> AsyncIterator[bytes]:
        for start, end in zip(edges, edges[1:], strict=False):
            yield body[start:end]

    upload = await receive_upload(chunks(), FORM, tmp_path, lambda _: 10_000, too_large, DiskReserve(tmp_path, 0))
    assert upload.content is not None and upload.content.read_bytes() == content
    assert (upload.fields, upload.filename, upload.size) == ({"purpose": "batch"}, "in.jsonl", len(content))
    os.unlink(upload.content)
