"""A real llama.cpp server for tests, in an environment with xllamacpp: `make test-llama` makes one. Other runs skip."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.system.server import free_port, wait_for

PYTHON = Path(__file__).parents[2] / ".venv-llama" / "bin" / "python"
START_S = 120.0
MARKS = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="llama.cpp has an environment of its own: make test-llama"),
    pytest.mark.timeout(400),
]


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    """Yield the URL of a server with the GGUF file `model`, or with Gemma 3 270M if there is no such file yet."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", model.with_suffix(".log")
    with log.open("wb") as out:
        argv = [str(PYTHON), "-I", str(Path(__file__).with_name("llama_server.py")), str(port), str(model)]
        process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            return httpx.get(f"{url}/v1/models").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_up, START_S, "llama.cpp")
        yield url
    finally:
        process.kill()
        process.wait(60)
