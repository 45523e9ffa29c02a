"""The examples and the Python of docs/batch.md, run against a real server with the demo model."""

import asyncio
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from gateway.jobs.webhooks.event import Event
from gateway.jobs.webhooks.sender import WebhookFailed, WebhookSender
from gateway.keys.webhooks import TargetPolicy, signed_headers
from tests.gateway.offline import jsonl, line
from tests.system.server import Server, free_port
from tests.waiting import until

pytestmark = pytest.mark.full

DEFAULT_URL = "http://127.0.0.1:8000/v1"
PAGE = Path(__file__).parents[2] / "docs" / "batch.md"
SECRET = "whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
PRINTED = {
    "Evaluation over a CSV": r"accuracy: [0-3] of 3\n",
    "Summaries with structured output": r"Tides: (nature|software): .*\nGateways: (nature|software): .*\n",
    "Classification with choices": r"Counter\(\{'(yes|no)': \d(, '(yes|no)': \d)?\}\)\n",
}


def python_of(section: str) -> str:
    """Return the one Python block of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


def examples() -> dict[str, list[tuple[str, str]]]:
    """Return the blocks (language, text) of each example by its title."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Examples\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### (.*)$", section, flags=re.MULTILINE)[1:]
    fence = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {title: fence.findall(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}


async def run(language: str, text: str, directory: Path, server: Server) -> str:
    """Run a block, and return what it has printed."""
    here = f'tidegate() {{ {shlex.quote(sys.executable)} -m tidegate "$@"; }}\nset -e\n'
    command = ["bash", "-c", here + text] if language == "sh" else [sys.executable, "-c", text]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PAGE.parents[1]), "OPENAI_BASE_URL": server.base_url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    return printed.decode()


def test_every_example_is_known() -> None:
    assert set(examples()) == set(PRINTED)


@pytest.mark.parametrize("title", PRINTED)
async def test_an_example_does_what_the_page_says(server: Server, tmp_path: Path, title: str) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    printed = [await run(language, text, tmp_path, server) for language, text in examples()[title]]
    assert len(printed) == 2 and re.fullmatch(PRINTED[title], printed[-1]), printed


async def test_a_large_file_goes_in_parts(server: Server, client: AsyncOpenAI, tmp_path: Path) -> None:
    body = {"model": "tidegate-demo", "messages": [{"role": "user", "content": "Repeat: k7Qz"}]}
    (tmp_path / "requests.jsonl").write_bytes(jsonl([line("a", body=body)]))
    printed = await run("python", python_of("Large files").replace(DEFAULT_URL, server.base_url), tmp_path, server)

    async def is_completed() -> bool:
        return (await client.batches.retrieve(printed.strip())).status == "completed"

    await until(is_completed, timeout_s=60)


async def test_the_receiver_takes_signed_events_only() -> None:
    port, event = free_port(), Event("evt_1", "batch.completed", "batch_1", 0, "")
    program = python_of("Webhooks").replace("whsec_…", SECRET).replace("8080", str(port))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    url, sender = f"http://127.0.0.1:{port}/", WebhookSender(TargetPolicy(allow_loopback=True))

    async def is_taken(now_s: int) -> bool:
        try:
            await sender.send(url, signed_headers(event.id, event.body(), SECRET, now_s), event.body())
        except WebhookFailed as failure:
            if "ConnectError" in str(failure):  # it does not listen yet
                return False
            raise
        return True

    try:
        await until(lambda: is_taken(int(time.time())), timeout_s=60)
        with pytest.raises(WebhookFailed, match="status 400"):
            await is_taken(0)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"batch.completed batch_1\n"
    finally:
        process.kill()
        await process.wait()
