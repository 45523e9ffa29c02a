"""`python -m bench conformance`: try clients that people use, in their default modes, against a served model.

Each client runs in an environment of its own (bench/conformance/clients.py), and each check is one thing that its users
do first. Exits with 1 if a check fails. Knows flags, processes and reports; does not know the clients' APIs.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from bench.conformance.clients import CLIENTS, Client, InstallError, install, versions
from bench.conformance.encoders import write_encoders
from bench.conformance.scripted_model import scripted_model
from bench.isolation.servers import serving_tidegate
from loadtest.client.http import Target, TargetError
from loadtest.reporting.record import Provenance, Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import ends_on_sigterm, one_sentence, print_progress, run_to_end, running_server

SCRIPT_TIMEOUT_S = 300.0
# The browser's page is of another origin, and lm-eval's scores are compared with transformers' in float32.
SERVER_FLAGS = ("--allowed-origins", "*", "--dtype", "float32")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one check. `error` is empty if it passed."""

    client: str
    check: str
    error: str


class Conformance(BaseModel):
    """Clients that people use, in their default modes, against a served model.

    Installs each client into an environment of its own under --work-dir, which takes minutes and gigabytes the first
    time. The clients' newest releases are taken, so a failure may also be news about a client.
    """

    url: str = Field("", description="A running Tidegate; empty: one is started with the demo model.")
    clients: str = Field("", description="Names of clients to try, separated by commas; empty: all.")
    work_dir: Path = Field(Path(".conformance"), description="Folder of the clients' environments, kept for next time.")
    allow_remote: bool = Field(False, description="Accept a URL that is not this machine.")
    json_file: Path | None = Field(None, alias="json", description="Write the outcomes to this file as JSON.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(TargetError, InstallError, said_by="conformance"):
            run_to_end(self._run())

    async def _run(self) -> None:
        chosen = [c for c in CLIENTS if not self.clients or c.name in self.clients.split(",")]
        if not chosen:
            raise TargetError(f"--clients: no such client; there are {', '.join(c.name for c in CLIENTS)}")
        outcomes: list[Outcome] = []
        installed: list[tuple[str, str]] = []
        async with AsyncExitStack() as stack:
            targets = {
                needs: await stack.enter_async_context(self._server(needs))
                for needs in sorted({client.needs for client in chosen})
            }
            for client in chosen:
                print_progress(f"{client.name}: install")
                folder = await asyncio.to_thread(install, client, self.work_dir.resolve())
                installed.append((client.name, versions(client, folder)))
                print_progress(f"{client.name}: run")
                outcomes += await _run_script(client, folder, targets[client.needs])
        model = ", ".join(target.model for target in targets.values())
        publish(_record(outcomes, installed, model), self.json_file)
        if any(outcome.error for outcome in outcomes):
            raise SystemExit(1)

    @asynccontextmanager
    async def _server(self, needs: str) -> AsyncIterator[Target]:
        """Yield the server for clients that need chats, agents' turns from the scripted model, or vectors."""
        if self.url and needs == "chat":
            yield await running_server(self.url, self.allow_remote)
            return
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-conformance-")))
            flags: tuple[str, ...] = SERVER_FLAGS
            if needs == "vectors":
                flags += ("--models", str(write_encoders(folder)))
            if needs == "agent":
                upstream = stack.enter_context(scripted_model())
                flags += ("--engine", "openai", "--upstream", upstream, "--upstream-dialect", "plain")
            async with serving_tidegate(None, "auto", folder, 0, flags) as server:
                yield server.target


async def _run_script(client: Client, folder: Path, target: Target) -> list[Outcome]:
    """Run the client's script and return the outcomes that it printed. A script that breaks is a failed check."""
    environment = {
        **os.environ,
        "CONFORMANCE_BASE_URL": f"http://{target.host}:{target.port}/v1",
        "CONFORMANCE_MODEL": target.model,
        "PYTHONPATH": "",
    }
    process = await asyncio.create_subprocess_exec(
        *client.command(folder),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SCRIPT_TIMEOUT_S):
            said, complained = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return [Outcome(client.name, "the script ends in time", f"still running after {SCRIPT_TIMEOUT_S:.0f} s")]
    outcomes = read_outcomes(client.name, said.decode())
    if process.returncode or not outcomes:
        outcomes.append(Outcome(client.name, "the script runs", complained.decode()[-500:].strip()))
    return outcomes


def read_outcomes(client: str, said: str) -> list[Outcome]:
    """Return the outcomes in the output of a script. Lines that a client printed are skipped."""
    outcomes = []
    for line in said.splitlines():
        if line.startswith('{"check"'):
            found = json.loads(line)
            outcomes.append(Outcome(client, found["check"], found["error"]))
    return outcomes


def _record(outcomes: Sequence[Outcome], installed: Sequence[tuple[str, str]], model: str) -> Record:
    rows = [(o.client, o.check, o.error or "passed") for o in outcomes]
    failed = sum(bool(o.error) for o in outcomes)
    checks = Section(
        "Checks",
        Table.of(("client", "check", "outcome"), rows),
        notes=(f"{len(outcomes) - failed} of {len(outcomes)} checks passed.",),
    )
    clients = Section("Clients", Table.of(("client", "packages"), installed))
    data = {"checks": [asdict(outcome) for outcome in outcomes], "clients": dict(installed)}
    return Record("Clients in their default modes", [checks, clients], data, Provenance.of_this_run(model, seed=0))
