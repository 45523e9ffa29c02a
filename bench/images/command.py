"""`python -m bench images`: build the images of gateway and worker, start them with a store, and try them.

The store is the Valkey of the gateway's image, so that nothing else is pulled. All containers share one network
namespace, and only the gateway's port is published, on this machine's loopback address. Knows flags, the order of
things and times; `checks` knows what is asked of a running server.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, Field

from bench.images.checks import Server
from bench.images.containers import ContainerError, Containers
from loadtest.reporting.record import Provenance, Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import ends_on_sigterm, one_sentence, print_progress

ROOT = Path(__file__).parents[2]
TARGETS = ("gateway", "worker-cpu")
USER_ID = "10001"
COMPILERS = "cc c++ gcc g++ clang clang++ ld"
START_LIMIT_S = 180.0
CHECK_S = 0.05  # seconds between two looks at something that is awaited
MIB = 1 << 20

STORE = """
import os
from tidegate.valkey import find_binary
server = str(find_binary())
os.execv(server, [server, "--bind", "127.0.0.1", "--appendonly", "yes", "--maxmemory-policy", "noeviction"])
"""


@dataclass(slots=True)
class Findings:
    """What was found: outcomes of checks (empty: passed), and figures with their units."""

    checks: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    def check(self, name: str, fault: str) -> None:
        print_progress(f"{name}: {fault or 'passed'}")
        self.checks[name] = fault

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.figures[name] = f"{time.monotonic() - began:.1f} s"


class Images(BaseModel):
    """The images of gateway and worker on CPU: built, started with a store, and tried.

    Needs podman or docker, the rights to use it, and minutes. --build-flags has what a build needs on this machine:
    another base image, an index of packages, certificates.
    """

    program: str = Field("", description="podman or docker; empty: the first that is installed.")
    build_flags: str = Field("", description="More flags of `build`, such as '--build-arg PYTHON_IMAGE=…'.")
    prefix: str = Field("localhost/tidegate-check-", description="What the images' names begin with.")
    keep: bool = Field(False, description="Keep the images.")
    json_file: Path | None = Field(None, alias="json", description="Write the outcomes to this file as JSON.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(ContainerError, TimeoutError, said_by="images"):
            findings = self._run(Containers.found(self.program))
        publish(_record(findings), self.json_file)
        if any(findings.checks.values()):
            raise SystemExit(1)

    def _run(self, containers: Containers) -> Findings:
        findings = Findings()
        tags = {target: f"{self.prefix}{target}" for target in TARGETS}
        with ExitStack() as cleanup:
            for target, tag in tags.items():
                print_progress(f"{target}: build")
                with findings.timed(f"{target}: build"):
                    containers.build(ROOT, target, tag, shlex.split(self.build_flags))
                if not self.keep:
                    cleanup.callback(containers.remove_image, tag)
                examine(containers, target, tag, findings)
            run_parts(containers, tags["gateway"], tags["worker-cpu"], findings)
        return findings


def examine(containers: Containers, target: str, tag: str, findings: Findings) -> None:
    """Check what an image contains."""
    image = containers.image(tag)
    findings.figures[f"{target}: size"] = f"{image.num_bytes / MIB:.0f} MiB"
    user = containers.run_once(tag, "id -u")
    findings.check(f"{target}: runs as {USER_ID}", "" if image.user == user == USER_ID else f"{image.user}, {user}")
    found = containers.run_once(tag, f"for name in {COMPILERS}; do command -v $name; done; true")
    findings.check(f"{target}: has no compiler", found.replace("\n", " "))
    unwritable = containers.run_once(tag, "touch $TIDEGATE_DATA_DIR/file $HF_HOME-file 2>&1; true")
    findings.check(f"{target}: writes to its volume", unwritable)


def run_parts(containers: Containers, gateway_tag: str, worker_tag: str, findings: Findings) -> None:
    """Start store, gateway and worker, check them together, and let worker and gateway drain."""
    store_flags = ("--publish", "127.0.0.1::8000", "--entrypoint", "python")
    with ExitStack() as parts:
        store = parts.enter_context(containers.running(gateway_tag, "-c", STORE, flags=store_flags))
        flags = ("--network", f"container:{store}", "--env", "TIDEGATE_REDIS_URL=redis://127.0.0.1:6379/0")
        server = Server(f"http://127.0.0.1:{containers.port(store, 8000)}")
        with findings.timed("gateway: from start to healthy"):
            gateway = parts.enter_context(containers.running(gateway_tag, flags=flags))
            wait_until(server.is_healthy, "the gateway is not healthy", lambda: containers.logs(gateway))
        health = containers.image(gateway_tag).health_command
        is_healthy = bool(health) and containers.passes(gateway, health)
        findings.check("gateway: passes the image's health check", "" if is_healthy else f"fails: {shlex.join(health)}")
        findings.check("not ready without a worker", "ready" if server.is_ready() else "")
        with findings.timed("worker-cpu: from start to ready"):
            worker = parts.enter_context(containers.running(worker_tag, flags=flags))
            wait_until(server.is_ready, "the worker is not ready", lambda: containers.logs(worker))
        said = containers.logs(worker)
        findings.check("worker-cpu: uses the image's kernels", "" if "own C++ kernels" in said else _last_line(said))
        findings.check("a chat is answered", server.chat())
        findings.check("a batch completes", server.batch())
        findings.check("worker-cpu: drains on SIGTERM", drain(containers, worker, server))
        with findings.timed("worker-cpu: from another start to ready"):
            wait_until(lambda: not server.is_ready(), "a worker that has ended still counts")
            containers.start_again(worker)
            wait_until(server.is_ready, "the worker is not ready again", lambda: containers.logs(worker))
        findings.check("gateway: drains on SIGTERM", drain(containers, gateway, server))


def drain(containers: Containers, name: str, server: Server) -> str:
    """Send SIGTERM to a part while an answer streams; return what is wrong with the answer or the exit code."""
    fault = server.stream(after_first_token=lambda: containers.terminate(name))
    code = containers.exit_code(name)
    return fault or (f"exit code {code}" if code else "")


def wait_until(is_true: Callable[[], bool], otherwise: str, logs: Callable[[], str] = str) -> None:
    """Wait until `is_true`. After `START_LIMIT_S`, raises `TimeoutError` with `otherwise` and the last line of logs."""
    deadline = time.monotonic() + START_LIMIT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} after {START_LIMIT_S:.0f} s. {_last_line(logs())}".strip())
        time.sleep(CHECK_S)


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "")


def _record(findings: Findings) -> Record:
    failed = sum(map(bool, findings.checks.values()))
    rows: Sequence[tuple[str, str]] = [(name, fault or "passed") for name, fault in findings.checks.items()]
    notes = (f"{len(rows) - failed} of {len(rows)} checks passed.",)
    checks = Section("Checks", Table.of(("check", "outcome"), rows), notes=notes)
    figures = Section("Sizes and times", Table.of(("what", "figure"), list(findings.figures.items())))
    return Record("Images", [checks, figures], asdict(findings), Provenance.of_this_run("demo model", seed=0))
