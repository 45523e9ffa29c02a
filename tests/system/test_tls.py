"""HTTPS of the real processes."""

import signal
from pathlib import Path

import httpx
import pytest
import trustme

from tests.gateway.http.test_tls import trusting, write_certificate
from tests.system.server import running, wait_for
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
