"""API keys of a running server: changed by `tidegate keys`, limited over the wire, and counted over a restart."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.system.nonces import MODEL
from tests.system.server import Server, run_to_end, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

OPERATOR = {"authorization": "Bearer sk-operator"}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text("keys: []\n")
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_API_KEY", "sk-operator")
        with running(tmp_path_factory.mktemp("serve"), "--api-keys", str(file), "--threads", "1") as own:
            own.wait_until_ready()
            yield own


def add(file: Path, name: str, *flags: str) -> str:
    done = run_to_end("keys", "add", name, "--file", str(file), *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def accepts(server: Server, secret: str) -> bool:
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.get(f"{server.base_url}/models", headers=headers, timeout=10).status_code == 200


def admin(server: Server, path: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.root}/admin/{path}", headers=OPERATOR, timeout=10)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def test_added_and_revoked_keys_count_without_a_restart(server: Server, file: Path) -> None:
    secret = add(file, "web")
    wait_for(lambda: accepts(server, secret), what="the new key to be accepted")
    assert not accepts(server, "sk-guess")
    file.write_text(f"{file.read_text()}broken")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: bool(admin(server, "keys")["problem"]), what="the broken file to be noticed")
    assert accepts(server, secret)
    file.write_text(file.read_text().removesuffix("broken"))
    assert run_to_end("keys", "revoke", "web", "--file", str(file)).returncode == 0
    wait_for(lambda: not accepts(server, secret), what="the revoked key to be refused")
    assert admin(server, "keys")["problem"] is None


async def test_the_official_client_waits_as_long_as_it_is_told_and_usage_outlives_a_killed_gateway(
    server: Server, file: Path
) -> None:
    secret = add(file, "busy", "--requests-per-minute", "10")
    wait_for(lambda: accepts(server, secret), what="the new key to be accepted")

    async def ask(client: AsyncOpenAI) -> int:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=2)
        return raw.retries_taken

    async with AsyncOpenAI(base_url=server.base_url, api_key=secret, timeout=60) as client:
        retries = await asyncio.gather(*(ask(client) for _ in range(11)))
    assert sorted(retries) == [0] * 10 + [1]

    def used() -> list[tuple[str, int]]:
        return [(row["key"], row["requests"]) for row in admin(server, "usage")["total"]]

    server.kill("gateway")
    wait_for(lambda: not server.is_listening(), what="the gateway to be gone")
    server.wait_until_ready()
    assert used() == [("busy", 11)], "an answer counts before its client has it"
