"""A real store that is made to refuse writes, in each way that a test can bring about without rights of its own."""

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis as sync_redis

from tests.system.server import wait_for
from tidegate.supervision.process import dies_with_parent
from tidegate.valkey import EmbeddedValkey

NO_LIMIT = resource.RLIM_INFINITY

# By error code: the command that makes the server refuse, and the one that ends this.
COMMANDS = {
    "OOM": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "NOREPLICAS": (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0")),
    "READONLY": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}
CODES = (*COMMANDS, "MISCONF")


@contextmanager
def refusing(url: str, code: str = "OOM") -> Iterator[None]:
    """Make the server at `url` refuse writes with the error `code` within the block."""
    with sync_redis.Redis.from_url(url) as client:
        if code == "MISCONF":
            with full_disk(client):
                yield
            return
        begin, end = COMMANDS[code]
        client.execute_command(*begin)
        try:
            yield
        finally:
            client.execute_command(*end)


@contextmanager
def full_disk(client: sync_redis.Redis) -> Iterator[None]:
    """Let the server's files grow no further within the block, as on a full disk.

    The server must be one of `limitable_valkey`.
    """
    pid = client.info("server")["process_id"]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, NO_LIMIT))
    try:
        try:
            client.set("a write that does not reach the disk", "", px=1)
        except sync_redis.ResponseError as error:
            if not str(error).startswith("MISCONF"):  # otherwise, another client's write has failed before this one
                raise
        # The server writes only after its running fsync, up to 2 s later, and accepts writes until one has failed.
        wait_for(lambda: client.info("persistence")["aof_last_write_status"] == "err", what="a write that fails")
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        wait_for(lambda: client.info("persistence")["aof_last_write_status"] == "ok", what="writes to the disk")


@contextmanager
def limitable_valkey(data_dir: Path) -> Iterator[str]:
    """Run an embedded server that survives a limit of its files' sizes. Yield its URL."""
    with EmbeddedValkey(data_dir) as valkey:
        die_with_parent = dies_with_parent()

        def prepare() -> None:
            die_with_parent()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        process = subprocess.Popen(
            valkey.argv,
            pass_fds=valkey.pass_fds,
            restore_signals=False,
            preexec_fn=prepare,
        )
        try:
            wait_for(valkey.answers_ping, what="the store")
            yield valkey.url
        finally:
            process.kill()
            process.wait(60)
