"""The faults: what breaks, when, and for how long, drawn from a seed; and how each is made.

Knows processes, links and clocks; does not know requests. Every fault ends by itself, except that a killed part comes
back when the supervisor has started it again.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from bench.chaos.site import GATEWAYS, STORE, WORKERS, Site
from loadtest.running import print_progress

FIRST_S = 2.0  # seconds of load before the first fault
PAUSES_S = (0.5, 2.5)  # seconds between the end of a fault and the beginning of the next
LONG_PAUSES_S = (4.0, 16.0)  # during a large job, so that parts that were killed do some work between two kills
FLUSH_S = 0.2  # seconds between two tries to reach a process that is being started


KINDS = (
    "kill",
    "stop",
    "delay",
    "cut",
    "refused writes",
    "full disk",
    "slow disk",
    "clocks forward",
    "clocks back",
    "one clock ahead",
)


@dataclass(slots=True)
class Fault:
    """`seconds` is how long it is planned to last; `amount` is its size: seconds of a delay, a sync or a jump."""

    kind: str
    target: str
    seconds: float = 0.0
    amount: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def needs_disks(self) -> bool:
        """Whether it is made by the library of `bench.chaos.disk`."""
        return self.kind == "slow disk" or (self.kind == "full disk" and self.target != STORE)

    def breaks_connections_to(self, gateway: str) -> bool:
        return self.kind in ("kill", "stop") and self.target == gateway


def planned_faults(
    seed: int, kinds: Sequence[str] = KINDS, pauses_s: tuple[float, float] = PAUSES_S
) -> Iterator[tuple[float, Fault]]:
    """Yield pauses and faults of `kinds` for ever. Each round has every fault once, in another order."""
    rng = random.Random(seed)
    while True:
        faults = [fault for fault in _one_round(rng) if fault.kind in kinds]
        rng.shuffle(faults)
        for fault in faults:
            yield rng.uniform(*pauses_s), fault


def _one_round(rng: random.Random) -> list[Fault]:
    links = [*WORKERS, *GATEWAYS]
    jump_s = rng.choice((15.0, 45.0, 600.0, 7200.0))
    return [
        *(Fault("kill", rng.choice(parts)) for parts in (WORKERS, GATEWAYS, (STORE,))),
        *(Fault("stop", rng.choice(parts), rng.uniform(0.5, 4.0)) for parts in (WORKERS, GATEWAYS, (STORE,))),
        Fault("delay", rng.choice(links), rng.uniform(1.0, 3.0), rng.uniform(0.02, 0.2)),
        Fault("cut", rng.choice(links), rng.uniform(0.3, 3.0)),
        Fault("refused writes", STORE, rng.uniform(0.5, 2.5)),
        Fault("full disk", STORE, rng.uniform(0.5, 2.5)),
        Fault("full disk", "gateways", rng.uniform(0.5, 2.5)),
        Fault("slow disk", STORE, rng.uniform(3.0, 6.0), rng.uniform(0.5, 3.0)),
        Fault("slow disk", rng.choice(GATEWAYS), rng.uniform(1.0, 3.0), rng.uniform(0.5, 3.0)),
        Fault("clocks forward", "all", 3.5, jump_s),
        Fault("clocks back", "all", 3.5, -jump_s),
        Fault("one clock ahead", rng.choice(links), 4.0, rng.uniform(15, 3600)),
    ]


class Injector:
    """Makes faults, one at a time. `faults` holds those that were made."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._offset_s = 0.0  # of all clocks
        self.faults: list[Fault] = []

    async def run(
        self,
        seed: int,
        duration_s: float,
        kinds: Sequence[str] = KINDS,
        pauses_s: tuple[float, float] = PAUSES_S,
    ) -> None:
        """Make faults until `duration_s` seconds have passed. The last one ends before that, or soon after."""
        await asyncio.sleep(FIRST_S)
        until_s = monotonic() + duration_s - FIRST_S
        for pause_s, fault in planned_faults(seed, kinds, pauses_s):
            if fault.needs_disks and self._site.disks.library is None:
                continue
            if monotonic() + pause_s + fault.seconds > until_s:
                return
            await asyncio.sleep(pause_s)
            await self.inject(fault)

    async def inject(self, fault: Fault) -> None:
        fault.began_s = monotonic()
        self.faults.append(fault)
        print_progress(f"{fault.kind} {fault.target} {fault.seconds:.1f} s {fault.amount or ''}")
        match fault.kind:
            case "kill":
                os.kill(await self._pid(fault.target), signal.SIGKILL)
            case "stop":
                await self._stop(fault)
            case "delay":
                self._site.links[fault.target].delay_s = fault.amount
                await asyncio.sleep(fault.seconds)
                self._site.links[fault.target].delay_s = 0.0
            case "cut":
                self._site.links[fault.target].cut()
                await asyncio.sleep(fault.seconds)
                self._site.links[fault.target].mend()
            case "refused writes":
                await self._site.store.config_set("maxmemory", 1)
                await asyncio.sleep(fault.seconds)
                await self._site.store.config_set("maxmemory", 0)
            case "full disk" if fault.target == STORE:
                await self._fill_disk_of_store(fault)
            case "full disk":  # the gateways have one data directory
                self._set_disks(GATEWAYS, is_full=True)
                await asyncio.sleep(fault.seconds)
                self._set_disks(GATEWAYS)
            case "slow disk":
                self._set_disks((fault.target,), sync_s=fault.amount)
                await asyncio.sleep(fault.seconds)
                self._set_disks((fault.target,))
            case "clocks forward" | "clocks back":
                self._offset_s += fault.amount
                for part in self._site.parts:
                    self._site.clocks.set(part, self._offset_s)
                await asyncio.sleep(fault.seconds)
            case "one clock ahead":
                self._site.clocks.set(fault.target, self._offset_s + fault.amount)
                await asyncio.sleep(fault.seconds)
                self._site.clocks.set(fault.target, self._offset_s)
            case _:
                raise ValueError(f"there is no fault {fault.kind!r}")
        fault.ended_s = monotonic()

    async def _stop(self, fault: Fault) -> None:
        pid = await self._pid(fault.target)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):  # the supervisor has killed it
            os.kill(pid, signal.SIGCONT)

    def _set_disks(self, parts: Sequence[str], *, sync_s: float = 0.0, is_full: bool = False) -> None:
        for part in parts:
            self._site.disks.set(part, sync_s=sync_s, is_full=is_full)

    async def _fill_disk_of_store(self, fault: Fault) -> None:
        """Let the store's files grow no more."""
        import psutil

        largest = max((path.stat().st_size for path in self._site.aof_dir.iterdir()), default=0)
        process = psutil.Process(await self._pid(STORE))
        process.rlimit(psutil.RLIMIT_FSIZE, (largest, psutil.RLIM_INFINITY))
        await asyncio.sleep(fault.seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))

    async def _pid(self, part: str) -> int:
        """Return the process id of a part; wait if it is being started."""
        while (pid := self._site.pid_of(part)) is None:
            await asyncio.sleep(FLUSH_S)
        return pid
