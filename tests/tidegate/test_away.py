"""`tidegate top` and `tidegate batch` at a server with a certificate, over real sockets: they say what is wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.http.server.tls import Certificate
from tests.gateway.http.test_tls import write_certificate
from tests.gateway.stand import serving_stand
from tidegate.batch.command import run_batch
from tidegate.top.command import run_top

Command = Callable[[str], int]


def top(url: str) -> int:
    return run_top(["--once", "--base-url", url])


def batch(url: str) -> int:
    return run_batch(["list", "--base-url", f"{url}/v1"])


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)


@pytest.mark.parametrize("command", [top, batch])
async def test_a_certificate_that_is_not_trusted_and_a_missing_s_are_said(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = Certificate(*write_certificate(tmp_path))
    async with serving_stand(certificate=certificate, with_worker=False) as stand:
        assert await asyncio.to_thread(command, stand.url) == 1
        assert "certificate is not trusted here: set SSL_CERT_FILE" in capsys.readouterr().err
        assert await asyncio.to_thread(command, stand.url.replace("https", "http")) == 1
        assert "If it has a certificate, its URL begins with https://" in capsys.readouterr().err


@pytest.mark.parametrize("command", [top, batch])
async def test_an_s_too_many_is_said(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving_stand(with_worker=False) as stand:
        assert await asyncio.to_thread(command, stand.url.replace("http", "https")) == 1
    assert "It speaks no TLS there: its URL begins with http://" in capsys.readouterr().err
