"""Another program beside the server: chats arrive steadily, and for a while busy loops take the CPU.

Knows requests, phases and windows of time; does not know how results are shown.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from bench.isolation.admin import wait_until_quiet
from bench.isolation.rounds import Progress, order_of_round
from bench.peers.arms import Servers, service_tier
from bench.peers.closed_loops import Loops, run_closed_loops
from bench.peers.processes import CpuMeter
from loadtest.client.answer import Outcome
from loadtest.client.http import TargetError
from loadtest.client.runner import ArmRun, ArmWindow, run_arm
from loadtest.estimates import Distribution
from loadtest.traffic.scenario import Lengths, TrafficClass
from loadtest.traffic.scenario_arrivals import OpenLoop

CHAT = "chat"
PROMPT_TOKENS, NEW_TOKENS = (32, 128), 32  # of a chat
WINDOW_S = 5.0  # seconds; length of the windows after the neighbour has ended
NORMAL_RATIO = 1.5  # first token p99 in a window ÷ that before the neighbour, up to which the server is back to normal
CAPACITY_STREAMS, CAPACITY_REQUESTS = 32, 3  # closed loop that measures how many chats a second a server completes
WARM_UP_S = 4.0  # seconds
WARM_UP_ROUND = 2000  # a round number that no part uses, so that its requests differ
# A busy loop with an end of its own, so that it ends even if this process is killed.
BUSY_LOOP = "import sys, time\nend_s = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end_s: pass"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The load: chats at `chats_per_s` for the three phases, with busy loops in the second one."""

    chats_per_s: float
    before_s: float
    busy_s: float
    after_s: float
    loops: int
    rounds: int
    settle_s: float
    drain_s: float
    seed: int

    @property
    def duration_s(self) -> float:
        return self.before_s + self.busy_s + self.after_s


@dataclass(frozen=True, slots=True)
class NeighbourPart:
    """One arm in one round. The neighbour's times are on the client's clock."""

    arm: str
    round_: int
    run: ArmRun
    began_s: float
    ended_s: float
    other_cores: float | None

    @property
    def chats(self) -> list[Outcome]:
        return self.run.outcomes[CHAT]

    def due_between(self, start_s: float, end_s: float) -> list[Outcome]:
        return [o for o in self.chats if start_s <= o.due_s < end_s]


@dataclass(frozen=True, slots=True)
class NeighbourSummary:
    """First tokens of one arm in the three phases, over all rounds. A chat belongs to the phase in which it was due."""

    arm: str
    before: Distribution
    during: Distribution
    after: Distribution
    recovery_s: tuple[float | None, ...]  # of each round; None: not back to normal by the end
    offered: int
    errors: int
    error_examples: tuple[str, ...]

    @property
    def longest_recovery_s(self) -> float | None:
        """The longest recovery of all rounds; None if a round did not recover."""
        times = [seconds for seconds in self.recovery_s if seconds is not None]
        return max(times) if times and len(times) == len(self.recovery_s) else None


async def measure_capacity(servers: Servers, arms: Sequence[str], seed: int, progress: Progress) -> float:
    """Return the chats per second that the slowest arm completes in a closed loop."""
    streams = (CAPACITY_STREAMS,)
    loops = Loops(streams, CAPACITY_REQUESTS, PROMPT_TOKENS, NEW_TOKENS, rounds=1, settle_s=0.0, seed=seed)
    parts = await run_closed_loops(servers, arms, loops, progress)
    rates = [sum(o.is_complete for o in part.outcomes) / part.elapsed_s for part in parts]
    progress(f"capacity: {', '.join(f'{p.arm} {rate:.2f} chats/s' for p, rate in zip(parts, rates, strict=True))}")
    return min(rates)


async def run_neighbour(
    servers: Servers, arms: Sequence[str], load: Neighbour, progress: Progress
) -> list[NeighbourPart]:
    """Measure all arms in all rounds. Raises `TargetError` if an arm serves nothing in the warm-up."""
    progress("warm-up")
    short = replace(load, before_s=min(WARM_UP_S, load.before_s), busy_s=0.0, after_s=0.0, loops=0)
    for arm in arms:
        part = await _run_part(servers, arm, short, WARM_UP_ROUND)
        if part.chats and not any(o.is_complete for o in part.chats):
            raise TargetError(f"{arm}: no chat was served: {part.chats[0].error}")
    parts = []
    for round_ in range(load.rounds):
        for arm in order_of_round(arms, round_):
            progress(f"round {round_ + 1} of {load.rounds}: {arm} ({load.duration_s:g} s)")
            parts.append(await _run_part(servers, arm, load, round_))
    return parts


async def _run_part(servers: Servers, arm: str, load: Neighbour, round_: int) -> NeighbourPart:
    for server in servers.all:
        await wait_until_quiet(server.target, 0.0)
    await asyncio.sleep(load.settle_s)
    others, target = CpuMeter(servers.others(arm)), servers.target(arm)
    window = ArmWindow(load.duration_s, drain_s=load.drain_s)
    chats = chats_of(arm, load, salt=f"neighbour-{arm}-{round_}-{load.seed}")
    running = asyncio.create_task(run_arm(target, [chats], window, load.seed, round_))
    try:
        await asyncio.sleep(load.before_s)
        began_s = perf_counter()
        async with busy_loops(load.loops, load.busy_s):
            await asyncio.sleep(load.busy_s)
        ended_s = perf_counter()
        run = await running
    finally:
        running.cancel()
    return NeighbourPart(arm, round_, run, began_s, ended_s, others.cores())


def chats_of(arm: str, load: Neighbour, salt: str) -> TrafficClass:
    """Return the class of the chats. All arms get the same chats; `salt` keeps them apart in a prefix cache."""
    low, high = PROMPT_TOKENS
    return TrafficClass(
        name=CHAT,
        role="interactive",
        service_tier=service_tier(arm),
        arrivals=OpenLoop(rate_per_s=load.chats_per_s),
        prompt_tokens=Lengths(min=low, max=high),
        output_tokens=Lengths(min=NEW_TOKENS, max=NEW_TOKENS),
        extra_body={"cache_salt": salt},
    )


@asynccontextmanager
async def busy_loops(count: int, seconds: float) -> AsyncIterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that compute without a pause until the block ends, or for `seconds` if that is shorter."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-S", "-c", BUSY_LOOP, str(seconds)]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def summarize_neighbour(parts: Sequence[NeighbourPart]) -> list[NeighbourSummary]:
    """Return a summary for each arm."""
    return [_summarize([p for p in parts if p.arm == arm]) for arm in dict.fromkeys(p.arm for p in parts)]


def _summarize(parts: Sequence[NeighbourPart]) -> NeighbourSummary:
    chats = [o for part in parts for o in part.chats]
    errors = [o.error for o in chats if o.error is not None]
    before = _ttft([o for p in parts for o in p.due_between(p.run.start_s, p.began_s)])
    normal = before.quantile(0.99)
    return NeighbourSummary(
        parts[0].arm,
        before,
        _ttft([o for p in parts for o in p.due_between(p.began_s, p.ended_s)]),
        _ttft([o for p in parts for o in p.due_between(p.ended_s, p.run.end_s)]),
        tuple(None if normal is None else recovery_s(p, NORMAL_RATIO * normal.value) for p in parts),
        len(chats),
        len(errors),
        tuple(sorted(set(errors)))[:3],
    )


def recovery_s(part: NeighbourPart, normal_s: float) -> float | None:
    """Return the seconds from the neighbour's end to the first window whose first token p99 is at most `normal_s`.

    A window with a failed chat is not normal, and a window without chats says nothing. None if there is no such window.
    """
    start_s = part.ended_s
    while start_s + WINDOW_S <= part.run.end_s:
        chats = part.due_between(start_s, start_s + WINDOW_S)
        p99 = _ttft(chats).quantile(0.99)
        if p99 is not None and p99.value <= normal_s and all(o.is_complete for o in chats):
            return start_s - part.ended_s
        start_s += WINDOW_S
    return None


def _ttft(outcomes: Sequence[Outcome]) -> Distribution:
    return Distribution(np.array([o.ttft_s for o in outcomes if o.ttft_s is not None]))
