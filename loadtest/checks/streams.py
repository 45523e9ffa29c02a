"""Compare continuous batching with one request at a time. The same requests are sent both ways, in one run.

Each round sends all requests at once, and then a part of them one after the other. So after all rounds, every request
has also been served alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from loadtest.client.answer import Outcome
from loadtest.client.http import Target, completion_body, send
from loadtest.traffic.prompts import token_prompt
from loadtest.traffic.workload import PlannedRequest, generator


@dataclass(frozen=True, slots=True)
class Throughput:
    """The totals of one way of sending, over all rounds."""

    requests: int
    errors: int
    tokens: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class StreamsResult:
    streams: int
    together: Throughput
    one_at_a_time: Throughput
    error_examples: tuple[str, ...]

    @property
    def speedup(self) -> float | None:
        alone = self.one_at_a_time.tokens_per_s
        return self.together.tokens_per_s / alone if alone else None


async def run_streams(
    target: Target,
    *,
    streams: int,
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    service_tier: str | None,
    seed: int,
    timeout_s: float,
    report_progress: Callable[[str], None],
) -> StreamsResult:
    """Measure both ways of sending. Raises `TimeoutError` if the whole measurement takes longer than `timeout_s`."""
    seeds = generator(seed, "streams").integers(0, 2**31, size=streams).tolist()
    bodies = [
        completion_body(
            target,
            token_prompt(PlannedRequest("streams", i, 0.0, prompt_tokens, output_tokens, prompt_seed)),
            output_tokens,
            service_tier=service_tier,
        )
        for i, prompt_seed in enumerate(seeds)
    ]
    together: list[tuple[float, list[Outcome]]] = []
    alone: list[tuple[float, list[Outcome]]] = []
    async with asyncio.timeout(timeout_s):
        await _one_by_one(target, bodies[:1])  # warms the server up
        for round_ in range(rounds):
            report_progress(f"round {round_ + 1} of {rounds}: {streams} at once, then one at a time")
            together.append(await _timed(_all_at_once(target, bodies)))
            alone.append(await _timed(_one_by_one(target, bodies[round_::rounds])))
    errors = {o.error for _, outcomes in together + alone for o in outcomes if o.error}
    return StreamsResult(streams, _throughput(together), _throughput(alone), tuple(sorted(errors))[:3])


async def _timed(sending: Awaitable[list[Outcome]]) -> tuple[float, list[Outcome]]:
    start_s = perf_counter()
    outcomes = await sending
    return perf_counter() - start_s, outcomes


async def _all_at_once(target: Target, bodies: Sequence[tuple[str, bytes]]) -> list[Outcome]:
    return list(await asyncio.gather(*(_send_one(target, i, *b) for i, b in enumerate(bodies))))


async def _one_by_one(target: Target, bodies: Sequence[tuple[str, bytes]]) -> list[Outcome]:
    return [await _send_one(target, i, *b) for i, b in enumerate(bodies)]


async def _send_one(target: Target, index: int, path: str, body: bytes) -> Outcome:
    outcome = Outcome("streams", index, due_s=perf_counter())
    await send(target, path, body, outcome, streamed=True)
    return outcome


def _throughput(timed: Sequence[tuple[float, Sequence[Outcome]]]) -> Throughput:
    outcomes = [o for _, sent in timed for o in sent]
    return Throughput(
        requests=len(outcomes),
        errors=sum(o.error is not None for o in outcomes),
        tokens=sum(o.completion_tokens for o in outcomes),
        elapsed_s=sum(elapsed_s for elapsed_s, _ in timed),
    )
