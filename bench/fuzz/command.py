"""`python -m bench fuzz`: odd requests of four kinds against the gateway, and what they leave behind.

schemathesis makes requests from /openapi.json against a running server, also in sequences over files and batches;
atheris feeds the parsers of JSON and of forms; Hypothesis changes valid bodies (tests/gateway/test_fuzz.py). Meanwhile
one client streams, and afterwards nothing may be left open. Exits with 1 after an error 5xx, a failed check or a leak.
The stream's longest gap is only reported, because it depends on the machine.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
from pydantic import BaseModel, Field

from bench.isolation.servers import serving_tidegate
from loadtest.client.http import Target, TargetError
from loadtest.running import ends_on_sigterm, one_sentence, print_progress, run_to_end

# Checks of schemathesis that are left out. positive_data_acceptance: what is right in a body also depends on the model,
# its context and other fields, which a JSON schema cannot say. negative_data_rejection: unknown fields pass, as in
# vLLM, unless they look like a misspelt one.
LEFT_OUT = "positive_data_acceptance,negative_data_rejection"
ENDLESS = "/admin/sla/stream"  # its answer never ends
START_S = 60.0  # seconds for the worker of tasks to start
SECONDS_PER_EXAMPLE = 0.05  # what one example of the Hypothesis tests takes; there are five of these tests


class Fuzz(BaseModel):
    """Odd requests of four kinds against the gateway, and what they leave behind.

    Needs `pip install 'tidegate[dev,fuzz]'`. atheris is left out where it has no wheel. Every kind gets the same time.
    With --seed, schemathesis makes the same requests again.
    """

    seconds: float = Field(60.0, gt=0, description="Seconds for each of the four kinds.")
    seed: int | None = Field(None, description="Seed of schemathesis; empty: a new one, which it prints.")
    corpus: Path = Field(Path(".fuzz"), description="Folder of the inputs that atheris keeps for next time.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(TargetError, said_by="fuzz"):
            run_to_end(self._run())

    async def _run(self) -> None:
        if find_spec("schemathesis") is None:
            raise TargetError("schemathesis is not installed: pip install 'tidegate[dev,fuzz]'")
        faults = await self._fuzz_server()
        parsers = ("json", "multipart") if find_spec("atheris") else ()
        for parser in parsers:
            folder = self.corpus / parser
            folder.mkdir(parents=True, exist_ok=True)
            flags = [
                f"-max_total_time={self.seconds:.0f}",
                "-max_len=4096",
                "-timeout=10",
                "-print_final_stats=1",
                str(folder),
            ]
            faults += await _run_program(
                f"atheris, {parser}", "executed_units", "-m", "bench.fuzz.guided", parser, *flags
            )
        examples = max(10, int(self.seconds / 5 / SECONDS_PER_EXAMPLE))
        tests = ("-m", "pytest", "-q", "--show-capture=no", "--timeout=0", "tests/gateway/test_fuzz.py")
        faults += await _run_program("Hypothesis", "passed", *tests, TIDEGATE_FUZZ_EXAMPLES=str(examples))
        for fault in faults:
            print(f"fuzz: {fault}")
        if faults:
            raise SystemExit(1)

    async def _fuzz_server(self) -> list[str]:
        from bench.fuzz.leaks import held_by, until_idle  # imports psutil

        with tempfile.TemporaryDirectory(prefix="tidegate-fuzz-") as name:
            folder = Path(name)
            async with serving_tidegate(None, "auto", folder, 0, ()) as server:
                assert server.pid is not None, "the server was started here"
                store_url = f"unix://{folder}/data/valkey.sock"
                async with _serving_tasks(store_url, server.target):
                    await _longest_gap(server.target, 1.0)  # opens what is opened once
                    before = await held_by(server.pid, store_url)
                    streaming = asyncio.create_task(_longest_gap(server.target, self.seconds))
                    faults = await _run_program("schemathesis", "generated,", *self._schemathesis(server.target))
                    print_progress(f"longest gap of a stream meanwhile: {1000 * await streaming:.0f} ms")
                    faults += await until_idle(server.target)
                    return faults + (await held_by(server.pid, store_url)).growth(before)

    def _schemathesis(self, target: Target) -> Sequence[str]:
        url = f"http://{target.host}:{target.port}/openapi.json"
        flags = [f"--max-time={self.seconds:.0f}", f"--exclude-checks={LEFT_OUT}", f"--exclude-path={ENDLESS}"]
        seed = [] if self.seed is None else [f"--seed={self.seed}"]
        return ["-m", "schemathesis.cli", "run", url, *flags, *seed, "--workers=1", "--no-color", "--warnings=off"]


@asynccontextmanager
async def _serving_tasks(store_url: str, target: Target) -> AsyncIterator[None]:
    """Run a worker whose endpoint gives every item back, so that tasks have somebody who does them."""
    flags = ("--engine", "static", "--endpoint", "python:builtins.list", "--batch", "4", "--redis-url", store_url)
    worker = await asyncio.create_subprocess_exec(sys.executable, "-m", "tidegate", "worker", *flags)
    try:
        async with (
            asyncio.timeout(START_S),
            httpx.AsyncClient(base_url=f"http://{target.host}:{target.port}") as client,
        ):
            while (await client.post("/v1/tasks", json={"input": 1})).status_code != 202:
                await asyncio.sleep(0.1)
        yield
    finally:
        worker.terminate()
        await worker.wait()


async def _run_program(what: str, counted: str, *arguments: str, **environment: str) -> list[str]:
    """Run a program of this Python, and print the lines of its output with the word `counted`.

    Return what is wrong: nothing if it ends with code 0.
    """
    print_progress(what)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env=os.environ | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    lines = said.decode(errors="replace").splitlines()
    print_progress("\n".join(line for line in lines if counted in line))
    if process.returncode:
        print("\n".join(lines[-400:]))
    return [f"{what} ended with code {process.returncode}"] if process.returncode else []


async def _longest_gap(target: Target, seconds: float) -> float:
    """Stream answers for `seconds`, one after the other. Return the longest time between two parts of one."""
    body = {"model": target.model, "prompt": "1", "max_tokens": 500, "ignore_eos": True, "stream": True}
    longest_s, end_s = 0.0, time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=f"http://{target.host}:{target.port}", timeout=60) as client:
        while time.monotonic() < end_s:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                last_s = None
                async for _ in answer.aiter_bytes():
                    now_s = time.monotonic()
                    longest_s = max(longest_s, now_s - last_s if last_s is not None else 0.0)
                    last_s = now_s
    return longest_s
