"""The checks of a server in containers, on one that runs here: they pass on a whole server, and find what is wrong."""

import asyncio
from pathlib import Path

import pytest

from bench.images.checks import Server
from bench.isolation.servers import serving_tidegate
from tests.system.server import free_port


def fault_of_each_check(server: Server) -> list[str]:
    return [server.chat(), server.batch(), server.stream(after_first_token=lambda: None)]


@pytest.mark.timeout(120)
@pytest.mark.full
async def test_a_whole_server_passes(tmp_path: Path) -> None:
    async with serving_tidegate(None, "auto", tmp_path, 0, ()) as running:
        server = Server(f"http://{running.target.host}:{running.target.port}")
        assert await asyncio.to_thread(server.is_healthy)
        assert await asyncio.to_thread(server.is_ready)
        assert await asyncio.to_thread(fault_of_each_check, server) == ["", "", ""]


def test_where_no_server_is_each_check_says_so() -> None:
    server = Server(f"http://127.0.0.1:{free_port()}")
    assert not server.is_healthy()
    assert not server.is_ready()
    faults = [server.chat(), server.batch(), server.stream(after_first_token=lambda: None)]
    assert all("onnection" in fault for fault in faults), faults
