"""`python -m bench facade`: the requests per second that the gateway answers, beside LiteLLM's proxy.

Our side is the whole server: gateway, store, and the engine with the demo model, for answers of a few tokens. The proxy
answers by itself with a text of its configuration, so nothing lies behind it. Both run on the client's machine and take
turns; each request has a connection of its own. Knows requests and rates.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from pydantic import BaseModel, Field

from bench.conformance.clients import CLIENTS, InstallError, install
from bench.isolation.rounds import order_of_round
from bench.isolation.servers import serving_tidegate
from loadtest.client.answer import Outcome
from loadtest.client.http import Target, TargetError, completion_body, send
from loadtest.client.runner import MAX_IN_FLIGHT
from loadtest.estimates import Distribution
from loadtest.reporting.record import Provenance, Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import ends_on_sigterm, one_sentence, print_progress, run_to_end
from loadtest.serving import serving

OURS, LITELLM = "tidegate", "litellm"
QUESTION, NEW_TOKENS = "How much is 17 + 25?", 4
WARM_UP_S = 3.0
PROXY_CONFIG = """
model_list:
  - model_name: mock
    litellm_params: {model: openai/mock, api_key: none, mock_response: "17 + 25 = 42"}
litellm_settings: {telemetry: false}
"""


@dataclass(frozen=True, slots=True)
class FacadePart:
    """One arm with a number of open requests, whole or streamed. `outcomes` holds the requests that ended in time."""

    arm: str
    streams: int
    streamed: bool
    elapsed_s: float
    outcomes: Sequence[Outcome]
    client_cores: float

    @property
    def per_s(self) -> float:
        return sum(o.is_complete for o in self.outcomes) / self.elapsed_s

    @property
    def errors(self) -> list[str]:
        return [o.error for o in self.outcomes if o.error is not None]


class Facade(BaseModel):
    """Requests per second of the gateway, whole and streamed, beside LiteLLM's proxy with answers of its own.

    Installs the proxy into an environment under --work-dir, as `conformance` does.
    """

    streams: str = Field("1,64,900", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="Numbers of open requests.")
    duration: float = Field(10.0, gt=0, le=600, description="Seconds of each part.")
    rounds: int = Field(2, ge=1, le=20, description="Times that each arm takes its turn.")
    arms: str = Field(f"{OURS},{LITELLM}", description="Arms to measure.")
    work_dir: Path = Field(Path(".conformance"), description="Folder of the proxy's environment, kept for next time.")
    json_file: Path | None = Field(None, alias="json", description="Write the results to this file as JSON.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(TargetError, InstallError, said_by="facade"):
            run_to_end(self._run())

    async def _run(self) -> None:
        arms = self.arms.split(",")
        if unknown := [arm for arm in arms if arm not in (OURS, LITELLM)]:
            raise TargetError(f"--arms: there is no arm {unknown[0]!r}; there are {OURS} and {LITELLM}")
        numbers = [int(number) for number in self.streams.split(",")]
        if max(numbers) > MAX_IN_FLIGHT:
            raise TargetError(f"--streams: at most {MAX_IN_FLIGHT}, since each one is an open connection")
        parts = []
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-facade-")))
            targets = {arm: await stack.enter_async_context(self._server(arm, folder)) for arm in arms}
            for target in targets.values():
                await _closed_loop(OURS, target, 8, False, WARM_UP_S)
            for round_ in range(self.rounds):
                for streams in numbers:
                    for streamed in (False, True):
                        for arm in order_of_round(arms, round_):
                            part = await _closed_loop(arm, targets[arm], streams, streamed, self.duration)
                            kind = "streamed" if streamed else "whole"
                            print_progress(f"{streams} {kind}, {arm}: {part.per_s:.0f}/s")
                            parts.append(part)
        publish(facade_record(parts), self.json_file)

    @asynccontextmanager
    async def _server(self, arm: str, folder: Path) -> AsyncIterator[Target]:
        if arm == OURS:
            async with serving_tidegate(None, "auto", folder, 0, ()) as ours:
                yield ours.target
            return
        proxy = next(client for client in CLIENTS if client.name == "litellm-proxy")
        environment = await asyncio.to_thread(install, proxy, self.work_dir.resolve())
        config = folder / "litellm.yaml"
        config.write_text(PROXY_CONFIG)
        command = [str(environment / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        environ = {**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
        async with serving(command, folder / "litellm.log", "/health/liveliness", environ) as server:
            yield server.target


async def _closed_loop(arm: str, target: Target, streams: int, streamed: bool, duration_s: float) -> FacadePart:
    """Keep `streams` requests open for `duration_s` seconds. Requests that have not ended by then do not count."""
    options = {"include_usage": True} if streamed else None
    path, body = completion_body(target, QUESTION, NEW_TOKENS, stream=streamed, stream_options=options)
    ended: list[Outcome] = []

    async def stream() -> None:
        while True:
            outcome = Outcome(arm, len(ended), due_s=perf_counter())
            await send(target, path, body, outcome, streamed=streamed)
            ended.append(outcome)

    started_s, client_s = perf_counter(), process_time()
    tasks = [asyncio.create_task(stream()) for _ in range(streams)]
    done, _ = await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_EXCEPTION)
    elapsed_s, outcomes = perf_counter() - started_s, list(ended)
    cores = (process_time() - client_s) / elapsed_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()  # raises what has ended the stream
    return FacadePart(arm, streams, streamed, elapsed_s, outcomes, cores)


def facade_record(parts: Sequence[FacadePart]) -> Record:
    groups: dict[tuple[int, bool, str], list[FacadePart]] = {}
    for part in parts:
        groups.setdefault((part.streams, part.streamed, part.arm), []).append(part)
    rates = {key: float(np.mean([part.per_s for part in group])) for key, group in groups.items()}
    rows = []
    for key, group in groups.items():
        streams, streamed, arm = key
        beside = rates.get((streams, streamed, LITELLM))
        times = Distribution(np.array([o.e2e_s for p in group for o in p.outcomes if o.e2e_s is not None]))
        rows.append(
            (
                str(streams),
                "streamed" if streamed else "whole",
                arm,
                f"{rates[key]:.0f}",
                "–" if arm == LITELLM or not beside else f"{rates[key] / beside:.1f}",
                _ms(times, 0.5),
                _ms(times, 0.99),
                str(sum(len(part.errors) for part in group)),
                f"{np.mean([part.client_cores for part in group]):.2f}",
            )
        )
    header = ("open", "answers", "arm", "requests/s", "÷ LiteLLM", "p50 ms", "p99 ms", "errors", "client's cores")
    data = {"parts": [_data(part) for part in parts]}
    section = Section("Requests per second", Table.of(header, rows))
    return Record("The facade", [section], data, Provenance.of_this_run("demo", seed=0))


def _ms(times: Distribution, quantile: float) -> str:
    value = times.quantile(quantile)
    return "–" if value is None else f"{1000 * value.value:.0f}"


def _data(part: FacadePart) -> dict[str, object]:
    return {
        "arm": part.arm,
        "streams": part.streams,
        "streamed": part.streamed,
        "requests_per_s": part.per_s,
        "errors": part.errors[:3],
    }
