"""HTTPS: streams, handshakes that never end, certificates that cannot be used or are renewed. Over real sockets."""

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from gateway.http.server.connections import ConnectionLimits
from gateway.http.server.tls import Certificate, CertificateError
from tests.gateway.stand import Stand, serving_stand
from tests.gateway.tiny_model import MODEL

LIMITS = ConnectionLimits(receive_timeout_s=60)
AUTHORITY = trustme.CA()


def write_certificate(folder: Path, authority: trustme.CA = AUTHORITY) -> tuple[Path, Path]:
    """Write a certificate for this machine. Return the paths of the certificate and of its key."""
    issued = authority.issue_cert("127.0.0.1", "localhost")
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    issued.cert_chain_pems[0].write_to_path(certfile)
    issued.private_key_pem.write_to_path(keyfile)
    return certfile, keyfile


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(*write_certificate(tmp_path))


def trusting(authority: trustme.CA = AUTHORITY) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@contextmanager
def half_open(stand: Stand, number: int, sent: bytes = b"") -> Iterator[Sequence[socket.socket]]:
    """Open connections that never finish their handshakes."""
    address = ("127.0.0.1", httpx.URL(stand.url).port)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(address)) for _ in range(number)]
        for connection in sockets:
            connection.sendall(sent)
            connection.setblocking(False)
        yield sockets


async def is_closed(connection: socket.socket) -> bool:
    try:
        async with asyncio.timeout(30):
            while await asyncio.get_running_loop().sock_recv(connection, 1024):
                pass  # an alert of TLS
    except ConnectionResetError:
        pass
    return True


def closed(stand: Stand, reason: str) -> float:
    return stand.metric("tidegate_connections_closed_total", reason=reason)


async def test_the_openai_client_streams_over_https(certificate: Certificate) -> None:
    async with serving_stand("Over the wire.", certificate=certificate) as stand:
        assert stand.url.startswith("https://")
        http = openai.DefaultAsyncHttpxClient(verify=trusting())
        async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="sk", http_client=http) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(texts) == "Over the wire."


async def test_plain_http_and_noise_end_only_their_own_connection(certificate: Certificate) -> None:
    async with serving_stand(certificate=certificate, with_worker=False) as stand:
        with half_open(stand, 3, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as sockets:
            assert all([await is_closed(connection) for connection in sockets])
        assert (await stand.http.get("/health")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02"], ids=["nothing", "the beginning of a hello"])
async def test_a_handshake_must_end_in_the_time_of_headers(certificate: Certificate, sent: bytes) -> None:
    limits = replace(LIMITS, receive_timeout_s=0.2)
    async with serving_stand(certificate=certificate, limits=limits, with_worker=False) as stand:
        with half_open(stand, 2, sent) as sockets:
            assert all([await is_closed(connection) for connection in sockets])


async def test_handshakes_count_as_connections_and_give_their_place_to_new_ones(certificate: Certificate) -> None:
    limits = replace(LIMITS, max_connections=8, max_per_address=8)
    async with serving_stand(certificate=certificate, limits=limits, with_worker=False) as stand:
        with half_open(stand, 40) as sockets:
            async with asyncio.timeout(30):
                assert (await stand.http.get("/health")).status_code == 200
            assert all([await is_closed(connection) for connection in sockets[:32]])
            assert closed(stand, "replaced") >= 32
            assert (await stand.http.get("/health")).status_code == 200


async def test_a_renewed_certificate_is_used_after_a_reload(tmp_path: Path) -> None:
    certificate, renewed = Certificate(*write_certificate(tmp_path)), trustme.CA()
    async with (
        serving_stand(certificate=certificate, with_worker=False) as stand,
        httpx.AsyncClient(verify=trusting(renewed), timeout=30) as client,
    ):
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{stand.url}/health")
        write_certificate(tmp_path, renewed)
        certificate.reload()
        assert (await client.get(f"{stand.url}/health")).status_code == 200


def test_a_bad_certificate_is_refused_with_one_sentence_and_the_old_one_stays(tmp_path: Path) -> None:
    certfile, keyfile = write_certificate(tmp_path)
    certificate = Certificate(certfile, keyfile)
    with pytest.raises(CertificateError, match="nowhere.pem does not exist"):
        Certificate(tmp_path / "nowhere.pem", keyfile)
    with pytest.raises(CertificateError, match="nokey.pem does not exist"):
        Certificate(certfile, tmp_path / "nokey.pem")
    with pytest.raises(CertificateError, match="--ssl-keyfile"):
        Certificate(certfile)
    AUTHORITY.issue_cert("other").private_key_pem.write_to_path(keyfile)
    with pytest.raises(CertificateError, match="belong together"):
        certificate.reload()
    keyfile.write_text("no key")
    with pytest.raises(CertificateError, match=r"key\.pem"):
        certificate.reload()


def test_a_key_with_a_password_is_refused_without_asking_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    certfile, keyfile = write_certificate(tmp_path)
    key = serialization.load_pem_private_key(keyfile.read_bytes(), None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    keyfile.write_bytes(key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(CertificateError, match="encrypted"):
        Certificate(certfile, keyfile)
