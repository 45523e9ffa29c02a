"""`python -m bench tasks`: tasks for an endpoint with fixed batches, against the promises of `/v1/tasks`.

Three measurements, each with a server of its own. endings: many tasks, calls and items that fail at random, and workers
that are killed; each task must end in a result or a dead letter. latency: tasks at random times, 80 % of what the
endpoint can take. full: an endpoint that hangs, and the share of the queue at which new tasks are refused.
"""

import asyncio
import random
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import httpx
import psutil
from pydantic import BaseModel, Field

from bench.isolation.servers import serving_tidegate
from bench.tasks.endpoint import FailingEndpoint, serving_endpoint
from loadtest.client.http import TargetError
from loadtest.reporting.output import publish
from loadtest.reporting.record import Record, Section, Table
from loadtest.running import ends_on_sigterm, one_sentence, print_progress, run_to_end
from loadtest.shipped_tiers import shipped_tiers_path
from scheduler.config import load_tiers

LIST = 1000  # tasks of one POST
ENDINGS_CALL_S = 0.005  # seconds of a call while endings are counted: the scheduler should be what is busy
FAILING_CALLS, FAILING_ITEMS, NUM_POISON = 0.02, 0.01, 20
LATENCY_CALL_S = 0.2
LATENCY_BATCH = 16  # a smaller one than usual: the client on the same cores has to keep up


class Tasks(BaseModel):
    """Tasks for an endpoint with fixed batches: endings after failures and kills, latency at 80 % load, refusals."""

    tasks: int = Field(100_000, ge=1000, le=1_000_000, description="Tasks of the first measurement.")
    kills: int = Field(3, ge=0, le=20, description="SIGKILLs of the worker meanwhile.")
    batch: int = Field(64, ge=1, le=1024, description="Items of a call.")
    duration: float = Field(60.0, gt=0, le=3600, description="Seconds of the second measurement.")
    parts: str = Field(
        "endings,latency,full",
        pattern=r"^(endings|latency|full)(,(endings|latency|full))*$",
        description="What to measure.",
    )
    seed: int = Field(1, description="Of arrival times.")
    json_file: Path | None = Field(None, alias="json", description="Write the results to this file as JSON.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(TargetError, said_by="tasks"):
            run_to_end(self._run())

    async def _run(self) -> None:
        rows, measures = [], {"endings": self._endings, "latency": self._latency, "full": self._full}
        for part in self.parts.split(","):
            for row in await measures[part]():
                print_progress(": ".join(row))
                rows.append(row)
        publish(Record(sections=[Section(table=Table.of(("measurement", "figure", "value"), rows))]), self.json_file)

    async def _endings(self) -> list[tuple[str, str, str]]:
        poison = frozenset(range(0, self.tasks, self.tasks // NUM_POISON))
        endpoint = FailingEndpoint(self.batch, ENDINGS_CALL_S, FAILING_CALLS, FAILING_ITEMS, poison)
        async with _serving(endpoint, self.batch) as (http, pid):
            began_s = perf_counter()
            killing = asyncio.create_task(_kill_workers(endpoint, pid, self.kills, self.tasks))
            ids = await _post_all(http, self.tasks)
            states = await _wait_for_ends(http, ids)
            took_s, kills = perf_counter() - began_s, await killing
        found = Counter(states)
        rows = [(state, str(count)) for state, count in sorted(found.items())]
        rows += [("lost", str(self.tasks - found["done"] - found["dead"])), ("wrong results", str(found["wrong"]))]
        rows += [("worker kills", str(kills)), ("tasks/s", f"{self.tasks / took_s:.0f}")]
        return [("endings", name, value) for name, value in rows]

    async def _latency(self) -> list[tuple[str, str, str]]:
        """Measure from a task's arrival at the gateway to its end, as the server counts it.

        A client on the same cores would measure mostly itself.
        """
        endpoint = FailingEndpoint(LATENCY_BATCH, LATENCY_CALL_S)
        per_s, draw, posted = 0.8 * LATENCY_BATCH / LATENCY_CALL_S, random.Random(self.seed), 0
        async with _serving(endpoint, LATENCY_BATCH) as (http, _), asyncio.TaskGroup() as group:
            begin_s = due_s = perf_counter()
            while (due_s := due_s + draw.expovariate(per_s)) < begin_s + self.duration:
                await asyncio.sleep(max(0.0, due_s - perf_counter()))
                group.create_task(http.post("/v1/tasks", json={"input": posted}))
                posted += 1
            took_s = perf_counter() - begin_s
            while await _sample(http, "tidegate_task_seconds_count") < posted:
                await asyncio.sleep(0.5)
            in_time = await _sample(http, 'tidegate_task_seconds_bucket{le="0.5"')
        rows = [("tasks/s", f"{posted / took_s:.0f}"), ("within 500 ms", f"{100 * in_time / posted:.2f} %")]
        rows += [("batch efficiency", f"{endpoint.items / endpoint.calls / LATENCY_BATCH:.2f}")]
        return [("latency at 80 %", name, value) for name, value in rows]

    async def _full(self) -> list[tuple[str, str, str]]:
        limit = load_tiers(shipped_tiers_path())["realtime"].queue_limit
        async with _serving(FailingEndpoint(self.batch, call_s=3600.0), self.batch) as (http, _):
            accepted = 0
            while (answer := await http.post("/v1/tasks", json={"input": accepted})).status_code == 202:
                accepted += 1
            found = re.search(r"\((\d+) waiting", answer.text)
            waiting = int(found[1]) if found else 0  # the others are in the endless call
        return [("full", f"{answer.status_code} begins at", f"{100 * waiting / limit:.1f} % of the queue")]


@asynccontextmanager
async def _serving(endpoint: FailingEndpoint, batch: int) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Yield a client of `tidegate serve --engine static`, and the server's process id."""
    with tempfile.TemporaryDirectory(prefix="tidegate-tasks-") as folder:
        async with serving_endpoint(endpoint) as url:
            flags = ("--engine", "static", "--endpoint", url, "--batch", str(batch), "--drain-s", "1")
            async with serving_tidegate(None, "auto", Path(folder), 0, flags) as server:
                base = f"http://{server.target.host}:{server.target.port}"
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(base_url=base, timeout=90.0, limits=limits) as http:
                    assert server.pid is not None
                    yield http, server.pid


async def _post_all(http: httpx.AsyncClient, count: int) -> list[str]:
    """Create tasks with the inputs 0, 1, 2 … in two tiers. Wait where the server says that its queue is full."""
    ids: list[str] = []
    for begin in range(0, count, LIST):
        body = {"inputs": list(range(begin, min(count, begin + LIST))), "service_tier": "flex"}
        while (answer := await http.post("/v1/tasks", json=body)).status_code == 503:
            await asyncio.sleep(min(2.0, float(answer.headers["retry-after"])))
        if answer.status_code != 202:
            raise TargetError(f"the server answered {answer.status_code}: {answer.text[:200]}")
        ids += [task["id"] for task in answer.json()["data"]]
    return ids


async def _wait_for_ends(http: httpx.AsyncClient, ids: Sequence[str]) -> list[str]:
    """Return the state of each task at its end; `wrong` if its result is not its input."""
    states: list[str] = []
    for begin in range(0, len(ids), LIST // 4):  # an URL has a limited length
        part = ids[begin : begin + LIST // 4]
        while True:
            found = (await http.get("/v1/tasks", params={"ids": ",".join(part)})).json()["data"]
            if all(task["state"] in ("done", "dead") for task in found):
                break
            await asyncio.sleep(0.2)
        results = {task["id"]: task for task in found}
        for number, task_id in enumerate(part, begin):
            task = results.get(task_id, {"state": "missing", "result": None})
            states.append("wrong" if task["state"] == "done" and task["result"] != number else task["state"])
    return states


async def _kill_workers(endpoint: FailingEndpoint, pid: int, kills: int, count: int) -> int:
    """Kill the worker each time that another part of the tasks was called. Return the number of kills."""
    for kill in range(1, kills + 1):
        while endpoint.items < kill * count / (kills + 1):
            await asyncio.sleep(0.01)
        worker = next(p for p in psutil.Process(pid).children() if "worker" in p.cmdline())
        worker.kill()
        print_progress(f"killed the worker after {endpoint.items} items")
    return kills


async def _sample(http: httpx.AsyncClient, prefix: str) -> float:
    """Return the sum of the samples in /metrics whose lines begin with `prefix`."""
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix))
