"""The checks of a server in containers, on one that runs here: they pass on a whole server, and find what is wrong."""

import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.images.checks import Server
from bench.isolation import servers
from bench.isolation.servers import serving_tidegate


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[servers.Server]:
    async with serving_tidegate(None, "cpu", tmp_path_factory.mktemp("server"), 0, ()) as server:
        yield server


def url(server: servers.Server) -> str:
    return f"http://{server.target.host}:{server.target.port}"
