"""Two servers on one store, which goes away and comes back."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.system.server import running, wait_for
from tidegate.valkey import running_valkey

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


def test_two_servers_share_a_store_and_survive_its_outage(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:
        store = ending.enter_context(contextlib.ExitStack())
        url = store.enter_context(running_valkey(tmp_path / "store"))
        shared = ("--redis-url", url, "--files-url", f"file://{tmp_path}/files")
        servers = [ending.enter_context(running(tmp_path / name, *shared)) for name in ("a", "b")]
        for server in servers:
            server.wait_until_ready()
        wait_for(lambda: all(len(set(server.workers())) == 2 for server in servers), 30, "two workers")
        before = [server.pid_of("worker") for server in servers]
        store.close()
        for pid in before:
            with contextlib.suppress(ProcessLookupError):  # the worker may have ended by itself
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not set(before) & {server.pid_of("worker") for server in servers}, 30, "new workers")
        ending.enter_context(running_valkey(tmp_path / "store"))
        for server in servers:
            server.wait_until_ready()
            server.process.send_signal(signal.SIGTERM)
        assert [server.process.wait(60) for server in servers] == [0, 0]
