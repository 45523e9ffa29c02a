"""The client against a real socket: errors become outcomes, and load stays on this machine."""

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from loadtest.client import http
from loadtest.client.answer import Outcome
from loadtest.client.http import Target, TargetError, completion_body, discover_model, get, parse_target, send
from tests.loadtest.fake_server import FakeServer


async def ask(server: FakeServer, *, stream: bool = True, max_tokens: int = 5) -> Outcome:
    target = parse_target(server.url)
    path, body = completion_body(target, "hello", max_tokens, stream=stream, service_tier="flex")
    outcome = Outcome("chat", 0, due_s=0.0)
    await send(target, path, body, outcome, streamed=stream)
    return outcome


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("separator", ["\n", "\r\n"])
async def test_an_answer_is_read_whole(stream: bool, separator: str) -> None:
    async with FakeServer(separator=separator) as server:
        outcome = await ask(server, stream=stream)
    assert outcome.error is None and outcome.is_complete
    assert outcome.text == " w0 w1 w2 w3 w4"
    assert (outcome.completion_tokens, outcome.service_tier, outcome.status) == (5, "flex", 200)
    assert outcome.ttft_s is not None and outcome.e2e_s is not None and 0 < outcome.ttft_s <= outcome.e2e_s


async def test_a_refusal_is_an_outcome_with_its_retry_after() -> None:
    async with FakeServer(status=lambda body: 429) as server:
        outcome = await ask(server)
    assert outcome.error == "rate_limit_exceeded: no"
    assert (outcome.status, outcome.retry_after_s, outcome.is_complete) == (429, 7.0, False)


async def test_no_server_is_an_outcome() -> None:
    async with FakeServer() as server:
        pass
    outcome = await ask(server)
    assert outcome.error is not None and outcome.error.startswith("cannot connect")


async def test_a_connection_that_breaks_is_an_outcome() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
        outcome = Outcome("chat", 0, due_s=0.0)
        await send(target, "/v1/completions", b"{}", outcome, streamed=True)
    assert outcome.error is not None and outcome.error.startswith("connection lost")


async def test_the_first_model_is_discovered_and_other_paths_are_errors() -> None:
    async with FakeServer() as server:
        target = parse_target(server.url)
        assert await discover_model(target) == "fake"
        assert b"tidegate_step_seconds_sum" in await get(target, "/metrics")
    with pytest.raises(TargetError, match="/v1/models"):
        await discover_model(target)


def test_bodies_leave_out_what_is_none() -> None:
    path, body = completion_body(Target("127.0.0.1", 1, model="m"), [5, 6], 3, ignore_eos=None)
    assert path == "/v1/completions"
    assert b"ignore_eos" not in body and b'"prompt":[5,6]' in body


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://localhost:8000/v1/", "http://[::1]:8000"])
def test_this_machine_is_accepted(url: str) -> None:
    assert parse_target(url).port == 8000
    assert parse_target(url).prefix == ""


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.7:8000", "http://127.0.0.1.example.com"])
def test_other_machines_need_a_flag(url: str) -> None:
    with pytest.raises(TargetError, match="not this machine"):
        parse_target(url)
    assert parse_target(url, allow_remote=True).host in url


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:8000", "127.0.0.1:8000", "http://"])
def test_urls_that_cannot_be_measured_are_refused(url: str) -> None:
    with pytest.raises(TargetError):
        parse_target(url)


async def test_tls_is_measured_if_the_certificate_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with FakeServer(tls=context) as server:
        target = parse_target(server.url)
        with pytest.raises(TargetError, match=f"https://127.0.0.1:{server.port}/v1/models: .*certificate"):
            await discover_model(target)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setattr(http, "_tls_context", lambda: ssl.create_default_context(cafile=tmp_path / "ca.pem"))
        assert await discover_model(target) == "fake"
        outcome = await ask(server)
    assert outcome.error is None and outcome.completion_tokens == 5
