"""The README's Python, run as it stands against a served demo model."""

import asyncio
import re
import sys
from pathlib import Path

from tests.system.server import Server

README = Path(__file__).parents[2] / "README.md"
DEFAULT_URL = "http://127.0.0.1:8000/v1"


def snippet() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


async def test_the_readmes_python_does_what_the_readme_says(server: Server) -> None:
    await asyncio.to_thread(server.wait_until_ready)
    program = snippet()
    assert DEFAULT_URL in program
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program.replace(DEFAULT_URL, server.base_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    assert printed.decode().splitlines() == ["default k7Qz-09ab", "flex k7Qz-09ab"]
