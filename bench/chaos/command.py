"""`python -m bench chaos`: the whole server under load while its parts are killed, stopped, cut off and misled.

Everything runs on 127.0.0.1 and ends with the command. The same seed makes the same faults in the same order.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog
from pydantic import BaseModel, Field

from bench.chaos.clock import Clocks
from bench.chaos.disk import Disks
from bench.chaos.faults import KINDS, Injector
from bench.chaos.leftovers import Leftovers
from bench.chaos.load import Load
from bench.chaos.report import RECOVERY_LIMIT_S, ChaosRun, chaos_record
from bench.chaos.site import GATEWAYS, Site
from loadtest.client.http import TargetError
from loadtest.extras import PROCESSES, require
from loadtest.reporting.output import publish
from loadtest.running import one_sentence, print_progress, run_to_end

# Seconds for any request to end. A gateway that hangs is killed after 15 s; background responses of a killed gateway
# count as lost 15 s later.
ANSWER_LIMIT_S = 40.0
BATCHES_LIMIT_S = 90.0  # seconds for the batches to end after the last fault
EX_PROBLEMS = 1


class Chaos(BaseModel):
    """Two gateways, two workers and a store under mixed load, while faults come at random. Fails if a promise breaks.

    Faults: parts killed and stopped, slow and cut connections to the store, refused writes, full and slow disks, clocks
    that jump. Checks: each batch line once and right; each answer right or ended with an error in OpenAI's format in
    time; nothing left over; each gateway answers again after each fault.
    """

    seed: int = Field(0, ge=0, description="The same seed makes the same faults.")
    duration_s: float = Field(60.0, ge=5, le=3600, description="Seconds of faults.")
    libfaketime: Path | None = Field(None, description="libfaketimeMT.so.1, for the store's clock, if it is elsewhere.")
    faults: str = Field(",".join(KINDS), description="Kinds of faults.")
    folder: Path | None = Field(None, description="New folder for logs and data, which stay; unset: a temporary one.")
    json_file: Path | None = Field(None, alias="json", description="Write the results to this file as JSON.")

    def cli_cmd(self) -> None:
        require(PROCESSES, "chaos")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # the parts have logs of their own
        with one_sentence(TargetError, said_by="chaos"), tempfile.TemporaryDirectory(prefix="tidegate-chaos-") as made:
            run_to_end(self._run(self.folder or Path(made)))

    async def _run(self, folder: Path) -> None:
        kinds = self.faults.split(",")
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise TargetError(f"--faults: there is no fault {unknown[0]!r}; there are {', '.join(KINDS)}")
        run = await chaos(folder, self.seed, self.duration_s, kinds, self.libfaketime)
        publish(chaos_record(run), self.json_file)
        if run.problems():
            raise SystemExit(EX_PROBLEMS)


async def chaos(
    folder: Path, seed: int, duration_s: float, kinds: Sequence[str] = KINDS, libfaketime: Path | None = None
) -> ChaosRun:
    """Start a server in `folder`, and let it run for `duration_s` seconds under load and faults.

    Raises `TargetError` if it ends meanwhile: a part cannot be kept running, or the command was interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clocks = Clocks(folder, libfaketime)
    if clocks.library is None:
        print_progress("the store's clock stays true: there is no libfaketime")
    disks = Disks(folder)
    if disks.library is None:
        print_progress("only the store's disk becomes full, and none slow: that needs Linux and a C compiler")
    async with Site(folder, clocks, disks) as site:
        work = asyncio.create_task(_work(site, seed, duration_s, kinds))
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


async def _work(site: Site, seed: int, duration_s: float, kinds: Sequence[str]) -> ChaosRun:
    load, leftovers, injector = Load(site.urls, seed, ANSWER_LIMIT_S), Leftovers(site), Injector(site)
    await leftovers.until_ready()
    await load.learn()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        print_progress(f"{duration_s:.0f} s of faults, seed {seed}")
        await injector.run(seed, duration_s, kinds)
        await load.until_answered_since(injector.faults[-1].began_s if injector.faults else 0.0, RECOVERY_LIMIT_S)
        load.stop()
    print_progress("waiting for the batches, and for what is left over")
    await load.finish(BATCHES_LIMIT_S)
    return ChaosRun(injector.faults, load.answers, load.batches, await leftovers.settle(), GATEWAYS, seed)
