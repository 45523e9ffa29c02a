"""Closed loops over HTTP: a number of streams, each of which sends its next request when the last one has ended.

The arms take turns on one machine, with requests of the same lengths and different tokens, so that no prefix cache
helps the arm that comes second. Knows requests and times; does not know how results are shown.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from bench.isolation.admin import wait_until_quiet
from bench.isolation.rounds import Progress, order_of_round
from bench.peers.arms import Servers, service_tier
from bench.peers.idle_servers import CpuMeter
from loadtest.client.answer import Outcome
from loadtest.client.http import Target, TargetError, completion_body, send
from loadtest.client.runner import ArmRun
from loadtest.progress import progress as shown
from loadtest.traffic.prompts import token_prompt
from loadtest.traffic.workload import PlannedRequest, generator

NAME = "closed-loop"
PART_TIMEOUT_S = 900.0  # a server that serves a part more slowly than this hangs
WARM_UP_ROUND = -1  # a round number that no part uses, so that its requests differ
WARM_UP_TOKENS = 8  # new tokens of a request of the warm-up


@dataclass(frozen=True, slots=True)
class Loops:
    """The load of the closed loops. `prompt_tokens` are the lowest and the highest length of a prompt."""

    streams: Sequence[int]
    requests_per_stream: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    rounds: int
    settle_s: float  # pause before each part, after all servers have become idle
    seed: int


@dataclass(frozen=True, slots=True)
class LoopPart:
    """The measurement of one arm with one number of streams in one round."""

    arm: str
    streams: int
    round_: int
    elapsed_s: float  # from the first request until the last answer has ended
    outcomes: list[Outcome]
    client_cores: float
    other_cores: float | None  # CPU cores that the servers of the other arms used; None if unknown
    was_quiet: bool

    @property
    def tokens_per_s(self) -> float:
        return sum(o.completion_tokens for o in self.outcomes) / self.elapsed_s

    @property
    def run(self) -> ArmRun:
        """The part as a run of which every request is measured."""
        start_s = min((o.due_s for o in self.outcomes), default=0.0)
        return ArmRun(start_s, self.elapsed_s, {NAME: self.outcomes}, self.client_cores)


async def run_closed_loops(servers: Servers, arms: Sequence[str], loops: Loops, progress: Progress) -> list[LoopPart]:
    """Measure all arms with all numbers of streams in all rounds.

    Raises `TargetError` if an arm serves nothing in the warm-up, and `TimeoutError` if a server hangs.
    """
    progress("warm-up")
    for arm in arms:
        await _warm_up(servers, arm, loops)
    parts = []
    with shown("parts", loops.rounds * len(loops.streams) * len(arms)) as show:
        for round_ in range(loops.rounds):
            for streams in loops.streams:
                for arm in order_of_round(arms, round_):
                    part = await _run_part(servers, arm, loops, streams, round_)
                    progress(
                        f"round {round_ + 1} of {loops.rounds}: {streams} streams, {arm}: "
                        f"{part.tokens_per_s:.0f} tokens/s in {part.elapsed_s:.0f} s"
                    )
                    parts.append(part)
                    show(len(parts))
    return parts


async def _warm_up(servers: Servers, arm: str, loops: Loops) -> None:
    """Send one short request for each stream of the largest number, since the first answers of a server are slow."""
    streams = max(loops.streams)
    short = Loops((streams,), 1, loops.prompt_tokens, WARM_UP_TOKENS, 1, loops.settle_s, loops.seed)
    part = await _run_part(servers, arm, short, streams, WARM_UP_ROUND)
    if not any(o.is_complete for o in part.outcomes):
        raise TargetError(f"{arm}: no request was served: {part.outcomes[0].error}")


async def _run_part(servers: Servers, arm: str, loops: Loops, streams: int, round_: int) -> LoopPart:
    target = servers.target(arm)
    bodies = [
        [
            completion_body(target, token_prompt(planned), planned.output_tokens, service_tier=service_tier(arm))
            for planned in of_stream
        ]
        for of_stream in plan_loops(loops, arm, streams, round_)
    ]
    was_quiet = all([await wait_until_quiet(server.target, 0.0) for server in servers.all])
    await asyncio.sleep(loops.settle_s)
    others = CpuMeter(servers.others(arm))
    outcomes: list[Outcome] = []
    start_s, client_start_s = perf_counter(), process_time()
    async with asyncio.timeout(PART_TIMEOUT_S):
        await asyncio.gather(*(_run_stream(target, of_stream, outcomes) for of_stream in bodies))
    elapsed_s = perf_counter() - start_s
    client_cores = (process_time() - client_start_s) / elapsed_s
    return LoopPart(arm, streams, round_, elapsed_s, outcomes, client_cores, others.cores(), was_quiet)


async def _run_stream(target: Target, bodies: Sequence[tuple[str, bytes]], outcomes: list[Outcome]) -> None:
    """Send the requests one after another. A failed request is not sent again."""
    for path, body in bodies:
        outcome = Outcome(NAME, len(outcomes), due_s=perf_counter())
        outcomes.append(outcome)
        await send(target, path, body, outcome, streamed=True)


def plan_loops(loops: Loops, arm: str, streams: int, round_: int) -> list[list[PlannedRequest]]:
    """Return the requests of each stream.

    The lengths are the same for every arm. The tokens are other ones in every arm, so no two prompts are alike.
    """
    count, stream = loops.requests_per_stream, (streams, round_ - WARM_UP_ROUND)
    low, high = loops.prompt_tokens
    lengths = generator(loops.seed, NAME, *stream).integers(low, high, size=(streams, count), endpoint=True)
    seeds = generator(loops.seed, NAME, arm, *stream).integers(0, 2**31, size=(streams, count))
    return [
        [
            PlannedRequest(NAME, i, 0.0, int(length), loops.new_tokens, int(seed))
            for i, (length, seed) in enumerate(zip(*of_stream, strict=True))
        ]
        for of_stream in zip(lengths, seeds, strict=True)
    ]
