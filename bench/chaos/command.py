"""`python -m bench chaos`: the whole server under load while its parts are killed, stopped, cut off and misled.

Everything runs on 127.0.0.1 and ends with the command. The same seed makes the same faults in the same order.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import structlog
from pydantic import BaseModel, Field

from bench.chaos.batches import Gateways
from bench.chaos.clock import Clocks
from bench.chaos.disk import Disks
from bench.chaos.faults import KINDS, LONG_PAUSES_S, PAUSES_S, Injector
from bench.chaos.job import Job, JobComparison, compared, job_lines
from bench.chaos.leftovers import Leftovers
from bench.chaos.load import BESIDE_JOB_S, PAUSE_S, Load
from bench.chaos.report import RECOVERY_LIMIT_S, ChaosRun, chaos_record
from bench.chaos.site import GATEWAYS, Site
from loadtest.client.http import TargetError
from loadtest.reporting.writers import publish
from loadtest.running import PROCESSES, one_sentence, print_progress, require, run_to_end

# Seconds for any request to end. A gateway that hangs is killed after 15 s; background responses of a killed gateway
# count as lost 15 s later.
ANSWER_LIMIT_S = 40.0
BATCHES_LIMIT_S = 90.0  # seconds for the batches to end after the last fault
JOB_LIMIT_S = 3600.0  # seconds for a large job to end
EX_PROBLEMS = 1
NONE = "none"  # as the kinds of faults


class Chaos(BaseModel):
    """Two gateways, two workers and a store under mixed load, while faults come at random. Fails if a promise breaks.

    Faults: parts killed and stopped, slow and cut connections to the store, refused writes, full and slow disks, clocks
    that jump. Checks: each batch line once and right; each answer right or ended with an error in OpenAI's format in
    time; nothing left over; each gateway answers again after each fault.
    """

    seed: int = Field(0, ge=0, description="The same seed makes the same faults.")
    duration_s: float = Field(60.0, ge=5, le=3600, description="Seconds of faults.")
    libfaketime: Path | None = Field(None, description="libfaketimeMT.so.1, for the store's clock, if it is elsewhere.")
    faults: str | None = Field(None, description="Kinds of faults, or none; unset: all, or with --lines kills.")
    lines: int = Field(0, ge=0, description="Lines of a batch that runs twice, in peace and under faults; 0: no such.")
    beside: Path | None = Field(None, description="A checkout of another release, from which some parts run.")
    beside_parts: str = Field("worker-2,gateway-2", description="The parts that run from --beside.")
    folder: Path | None = Field(None, description="New folder for logs and data, which stay; unset: a temporary one.")
    json_file: Path | None = Field(None, alias="json", description="Write the results to this file as JSON.")

    def cli_cmd(self) -> None:
        require(PROCESSES, "chaos")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # the parts have logs of their own
        with one_sentence(TargetError, said_by="chaos"), tempfile.TemporaryDirectory(prefix="tidegate-chaos-") as made:
            run_to_end(self._run(self.folder or Path(made)))

    async def _run(self, folder: Path) -> None:
        default = ("kill",) if self.lines else KINDS
        kinds = default if self.faults is None else self.faults.split(",") if self.faults != NONE else ()
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise TargetError(f"--faults: there is no fault {unknown[0]!r}; there are {', '.join(KINDS)}")
        sources = dict.fromkeys(self.beside_parts.split(","), self.beside.resolve()) if self.beside else {}
        run = await chaos(folder, self.seed, self.duration_s, kinds, self.libfaketime, self.lines, sources)
        publish(chaos_record(run), self.json_file)
        if run.problems():
            raise SystemExit(EX_PROBLEMS)


async def chaos(
    folder: Path,
    seed: int,
    duration_s: float,
    kinds: Sequence[str] = KINDS,
    libfaketime: Path | None = None,
    lines: int = 0,
    sources: Mapping[str, Path] = MappingProxyType({}),
) -> ChaosRun:
    """Start a server in `folder`, and let it run for `duration_s` seconds under load and faults.

    Without `kinds` there are no faults, and no request may fail. `sources` has the trees of parts that run from others.
    Raises `TargetError` if it ends meanwhile: a part cannot be kept running, or the command was interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clocks = Clocks(folder, libfaketime)
    if clocks.library is None:
        print_progress("the store's clock stays true: there is no libfaketime")
    disks = Disks(folder)
    if disks.library is None:
        print_progress("only the store's disk becomes full, and none slow: that needs Linux and a C compiler")
    # In bfloat16, a sequence that is continued may get other tokens than in one go.
    async with Site(folder, clocks, disks, ("--dtype", "float32"), sources) as site:
        work = asyncio.create_task(_work(site, seed, duration_s, kinds, lines))
        ended = asyncio.create_task(site.until_end())
        try:
            await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise TargetError(f"the server has ended: see the logs in {folder}")
            return _result_of(work)
        finally:
            for task in (work, ended):
                task.cancel()
            await asyncio.gather(work, ended, return_exceptions=True)


def _result_of(work: "asyncio.Task[ChaosRun]") -> ChaosRun:
    try:
        return work.result()
    except* TargetError as errors:
        found: BaseException = errors
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        raise found from errors


async def _work(site: Site, seed: int, duration_s: float, kinds: Sequence[str], lines: int) -> ChaosRun:
    load = Load(site.urls, seed, ANSWER_LIMIT_S, BESIDE_JOB_S if lines else PAUSE_S)
    leftovers, injector = Leftovers(site, is_calm=not kinds), Injector(site)
    await leftovers.until_ready()
    await load.learn()
    job = Job(Gateways(site.urls), job_lines(lines, seed)) if lines else None
    calm, calm_s = await job.run("calm", JOB_LIMIT_S) if job is not None else ({}, 0.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(with_batches=job is None))
        print_progress(f"{duration_s:.0f} s of faults, seed {seed}")
        running = group.create_task(job.run("killed", JOB_LIMIT_S)) if job is not None else None
        pauses_s = LONG_PAUSES_S if lines else PAUSES_S
        await (injector.run(seed, duration_s, kinds, pauses_s) if kinds else asyncio.sleep(duration_s))
        killed, killed_s = await running if running is not None else ({}, 0.0)
        await load.until_answered_since(injector.faults[-1].began_s if injector.faults else 0.0, RECOVERY_LIMIT_S)
        load.stop()
    print_progress("waiting for the batches, and for what is left over")
    await load.finish(BATCHES_LIMIT_S)
    comparison = JobComparison(lines, calm_s, killed_s, compared(calm, killed, lines)) if lines else None
    left = await leftovers.settle()
    return ChaosRun(injector.faults, load.answers, load.batches, left, GATEWAYS, seed, comparison, is_calm=not kinds)
