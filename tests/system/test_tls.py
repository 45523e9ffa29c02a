"""HTTPS of the real processes, and TLS to their store."""

import asyncio
import signal
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from tests.gateway.http.test_tls import trusting, write_certificate
from tests.scheduler.stalling_proxy import StallingProxy
from tests.system.nonces import ask
from tests.system.server import free_port, make_client, run_to_end, running, wait_for
from tidegate.valkey import running_valkey

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]


def answers(url: str, authority: trustme.CA) -> bool:
    try:
        return httpx.get(url, verify=trusting(authority), timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def test_a_gateway_serves_https_only_and_reads_a_renewed_certificate_on_sighup(tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    certfile, keyfile = write_certificate(tmp_path, first)
    with running_valkey(tmp_path / "store") as url:
        flags = ("--redis-url", url, "--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile))
        with running(tmp_path / "gateway", *flags, command="gateway") as gateway:
            health = f"https://127.0.0.1:{gateway.port}/health"
            wait_for(lambda: answers(health, first), 60, "HTTPS")
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{gateway.root}/health", timeout=5)
            keyfile.write_text("no key")
            gateway.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "the one in use stays" in gateway.log.read_text(), what="the refusal")
            assert answers(health, first)
            write_certificate(tmp_path, second)
            gateway.process.send_signal(signal.SIGHUP)
            wait_for(lambda: answers(health, second), what="the renewed certificate")


async def test_all_parts_reach_a_store_by_tls_and_say_why_they_do_not(tmp_path: Path) -> None:
    authority, context, port = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), free_port()
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    address = f"rediss://localhost:{port}?ssl_ca_certs={tmp_path}"
    with running_valkey(tmp_path / "store") as url:
        async with StallingProxy(url, port, context).serving():
            with running(tmp_path / "data", "--redis-url", f"{address}/ca.pem") as server:
                await asyncio.to_thread(server.wait_until_ready)
                async with make_client(server) as client:
                    assert await ask(client, "Abcd-1234") == "Abcd-1234"
                await server.end()
            refused = await asyncio.to_thread(run_to_end, "serve", "--port", "0", "--redis-url", f"{address}/other.pem")
            assert refused.returncode == 78
            assert "unable to get local issuer certificate" in refused.stderr
            assert "ssl_ca_certs=FILE" in refused.stderr
