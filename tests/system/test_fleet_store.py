"""The store of the compose file's fleet: Sentinel promotes the replica, and the old primary follows it."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.system.server import free_port, wait_for
from tests.test_deployment import SERVICES
from tidegate.valkey import find_binary

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]


class Site:
    """The services with their names and ports replaced by addresses of this machine, which have a name too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("valkey", "valkey-replica", "sentinel")}

    def here(self, text: str) -> str:
        return text.replace("valkey 6379", f"localhost {self.ports['valkey']}")

    @contextmanager
    def server(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        flags = self.here(" ".join(SERVICES[name]["command"][1:])).replace("valkey-replica", "localhost").split()
        yield from self._run(name, [str(find_binary()), *flags])

    @contextmanager
    def sentinel(self) -> Iterator[subprocess.Popen[bytes]]:
        shell, flag, script = SERVICES["sentinel"]["command"]
        program = f"exec {find_binary()} sentinel.conf --sentinel --port {self.ports['sentinel']}"
        assert script.endswith("exec valkey-sentinel sentinel.conf")
        script = self.here(script).replace("exec valkey-sentinel sentinel.conf", program)
        yield from self._run("sentinel", [shell, flag, script], own_port=False)

    def _run(self, name: str, argv: list[str], own_port: bool = True) -> Iterator[subprocess.Popen[bytes]]:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        port = ["--port", str(self.ports[name]), "--bind", "127.0.0.1"] if own_port else []
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen([*argv, *port], cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def ask(self, name: str, *command: str) -> Any:
        """Return a server's answer, or None while it does not answer."""
        with redis.Redis(port=self.ports[name], decode_responses=True) as client, suppress(redis.ConnectionError):
            return client.execute_command(*command)

    def primary(self) -> str:
        found = self.ask("sentinel", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "tidegate") or ["", 0]
        return {str(port): name for name, port in self.ports.items()}.get(str(found[1]), "")

    def role(self, name: str) -> str:
        return str((self.ask(name, "ROLE") or [""])[0])


def test_the_replica_takes_over_and_the_old_primary_follows_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with ExitStack() as stack:
        primary = stack.enter_context(site.server("valkey"))
        stack.enter_context(site.server("valkey-replica"))
        stack.enter_context(site.sentinel())
        wait_for(lambda: site.primary() == "valkey", what="Sentinel to name the primary")
        wait_for(
            lambda: bool(site.ask("sentinel", "SENTINEL", "REPLICAS", "tidegate")), what="Sentinel to find the replica"
        )
        assert site.ask("valkey", "SET", "kept", "yes")
        wait_for(lambda: site.ask("valkey-replica", "GET", "kept") == "yes", what="the replica to have it")
        primary.kill()
        wait_for(lambda: site.primary() == "valkey-replica", 60, "the replica to be promoted")
        wait_for(lambda: site.role("valkey-replica") == "master", what="the replica to be the primary")
        assert site.ask("valkey-replica", "GET", "kept") == "yes"
        stack.enter_context(site.server("valkey"))
        wait_for(lambda: site.role("valkey") == "slave", 60, "the old primary to follow")
