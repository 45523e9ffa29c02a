"""Laws 1 and 10: no sequence of operations loses or doubles a request or miscounts, and both queues agree."""

import asyncio
import math
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from scheduler.queue.base import AheadLimit, Backlog, DueLimit, Preference, Queue
from scheduler.request import Checkpoint, Claimed, Lease
from scheduler.store import connection
from scheduler.store.keys import Keys
from tests.scheduler.queue.harness import START_MS, Handles, ManualClock, listening, make_request
from tests.stores import Store

TIERS = ("realtime", "bulk", "batch")
WORKERS = ("w1", "w2")
IDS = tuple("abcdefgh")

tier = st.sampled_from(TIERS)
worker = st.sampled_from(WORKERS)
request_id = st.sampled_from(IDS)
job_part = st.sampled_from(["", "", "part-1", "part-2"])
deadline = st.integers(0, 3).map(lambda n: START_MS + n)
# A lease is drawn by its index among all leases ever granted, so most of them are stale.
leases = st.lists(st.integers(0, 30), min_size=1, max_size=4)
lease_s = st.sampled_from([1.0, 2.0])
tokens = st.integers(0, 9)
alone = st.none() | st.integers(0, 30)
ahead_limits = st.builds(
    AheadLimit,
    max_requests=st.sampled_from([0, 1, 2.5, math.inf]),
    max_s=st.sampled_from([-0.5, 0.0, 1.0, 3.0, math.inf]),
    prompt_token_s=st.sampled_from([0.0, 0.1, 0.7]),
    output_token_s=st.sampled_from([0.0, 0.3]),
    above=st.sampled_from([(), ("batch",), ("bulk", "realtime")]),
)
preferences = st.builds(
    Preference,
    st.lists(worker, min_size=1, max_size=2, unique=True).map(tuple),
    st.integers(0, 2),
    st.sampled_from([START_MS, START_MS + 500, START_MS + 10_000]),
)

operations = st.one_of(
    st.tuples(
        st.just("put"),
        tier,
        st.lists(st.tuples(request_id, deadline, tokens, tokens, job_part), min_size=1, max_size=4),
        st.none() | st.integers(0, 4),
        st.none() | ahead_limits,
        st.none() | preferences,
    ),
    st.tuples(
        st.just("claim"),
        worker,
        st.dictionaries(tier, st.integers(0, 3), min_size=1),
        lease_s,
        st.sampled_from([None, 0, 1, 2]),
        st.dictionaries(tier, st.builds(DueLimit, st.integers(0, 2), deadline), max_size=2),
    ),
    st.tuples(st.just("ack"), leases),
    st.tuples(st.just("renew"), leases, lease_s),
    st.tuples(st.just("release"), leases),
    st.tuples(st.just("advance"), st.sampled_from([0.5, 1.0, 2.5])),
    st.tuples(st.just("requeue_expired")),
    st.tuples(st.just("requeue_worker"), worker),
    st.tuples(st.just("cancel"), st.lists(request_id, min_size=1, max_size=3)),
    st.tuples(st.just("checkpoint"), leases, st.integers(0, 4), st.lists(st.integers(0, 2**32 - 1), max_size=3)),
    st.tuples(st.just("resume"), leases, st.lists(st.integers(0, 2**32 - 1), max_size=3)),
    st.tuples(st.just("note_step"), worker, st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=3), alone),
)
# Keys that an eviction policy or an operator may remove: the hash of a request, the sums of a tier.
losses = st.tuples(st.just("lose"), st.one_of(st.tuples(st.just("hash"), request_id), st.tuples(st.just("sums"), tier)))


@dataclass(slots=True)
class Trial:
    """One queue under test, with a record of accepted and finished requests."""

    clock: ManualClock
    handles: Handles
    granted: list[Lease] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)

    async def apply(self, operation: tuple) -> object:  # type: ignore[type-arg]
        name, *arguments = operation
        return await getattr(self, name)(*arguments)

    async def put(
        self,
        tier: str,
        requests: list[tuple[str, int, int, int, str]],
        limit: int | None,
        ahead: AheadLimit | None,
        prefer: Preference | None,
    ) -> object:
        rows = [make_request(i, tier, *more) for i, *more in requests]
        refused = await self.queue.put(rows, limit, ahead, None, prefer)
        if refused is None:
            self.alive.update(i for i, *_ in requests)
        return refused

    async def claim(
        self, worker: str, limits: dict[str, int], lease_s: float, load: int | None, due: dict[str, DueLimit]
    ) -> list[Claimed]:
        claimed = await self.handles(worker).claim(limits, lease_s, load, due)
        self.granted.extend(Lease(c.request.id, c.fence) for c in claimed)
        return claimed

    async def ack(self, picks: list[int]) -> list[bool]:
        picked = self._pick(picks)
        done = await self.queue.ack(picked)
        self.alive.difference_update(lease.request_id for lease, was_held in zip(picked, done, strict=True) if was_held)
        return done

    async def renew(self, picks: list[int], lease_s: float) -> list[bool]:
        return await self.queue.renew(self._pick(picks), lease_s)

    async def release(self, picks: list[int]) -> list[bool]:
        return await self.queue.release(self._pick(picks))

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def requeue_expired(self) -> list[str]:
        return await self.queue.requeue_expired(await self.queue.expired_leases(2.0))

    async def requeue_worker(self, worker: str) -> list[str]:
        return await self.queue.requeue_worker(worker)

    async def cancel(self, request_ids: list[str]) -> list[bool]:
        self.alive.difference_update(request_ids)
        return await self.queue.cancel(request_ids)

    async def checkpoint(self, picks: list[int], index: int, token_ids: list[int]) -> list[int]:
        return await self.queue.checkpoint([Checkpoint(lease, index, tuple(token_ids)) for lease in self._pick(picks)])

    async def resume(self, picks: list[int], token_ids: list[int]) -> list[bool]:
        return await self.queue.resume([Checkpoint(lease, 0, tuple(token_ids)) for lease in self._pick(picks)])

    async def note_step(self, worker: str, waits: list[tuple[int, bool]], alone: int | None) -> None:
        marks = {lease: waits[i][1] for i, lease in enumerate(self._pick([pick for pick, _ in waits]))}
        await self.handles(worker).note_step(marks, next(iter(self._pick([] if alone is None else [alone])), None))

    async def backlogs(self) -> dict[str, Backlog]:
        backlogs = await self.queue.backlogs(TIERS)
        assert await self.queue.depths(TIERS) == {name: backlog.requests for name, backlog in backlogs.items()}
        return backlogs

    @property
    def queue(self) -> Queue:
        return self.handles()

    def _pick(self, picks: list[int]) -> list[Lease]:
        return [self.granted[n % len(self.granted)] for n in picks] if self.granted else []


async def places(client: Redis) -> list[str]:
    """Return the ids in every tier's set and in the lease set, with repetitions."""
    found = [member.decode() for member in await client.zrange(Keys.of(client).leases, 0, -1)]
    for name in TIERS:
        found.extend(request_id for *_, request_id in await members(client, name))
    return found


async def members(client: Redis, tier: str) -> list[tuple[int, int, str]]:
    """Return prompt tokens, output tokens and id of each member of a tier's set."""
    parts = [m.decode().split(":", 3) for m in await client.zrange(Keys.of(client).queue + tier, 0, -1)]
    return [(int(prompt), int(output), request_id) for _, prompt, output, request_id in parts]


async def sums(client: Redis, tier: str) -> Backlog:
    """Compute the sums from the members."""
    found = await members(client, tier)
    return Backlog(len(found), sum(prompt for prompt, *_ in found), sum(output for _, output, _ in found))


async def hashes(client: Redis) -> list[str]:
    prefix = Keys.of(client).request
    return [key.decode().removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*", count=1000)]


async def scenario(url: str, done: list[tuple]) -> None:  # type: ignore[type-arg]
    client = connection.connect(url)
    memory_clock, redis_clock = ManualClock(), ManualClock()
    memory = Trial(memory_clock, Handles(memory_clock))
    redis = Trial(redis_clock, Handles(redis_clock, client))
    try:
        for name in WORKERS:  # a worker that does not listen counts as one that has ended
            memory.handles(name)
            await listening(redis.handles, name)
        for operation in done:
            assert await memory.apply(operation) == await redis.apply(operation), operation
            assert await memory.backlogs() == await redis.backlogs()
            assert await redis.backlogs() == {name: await sums(client, name) for name in TIERS}
            assert await memory.queue.idle_workers(TIERS) == await redis.queue.idle_workers(TIERS)
            assert memory.alive == redis.alive
            assert sorted(await places(client)) == sorted(redis.alive), "each request in exactly one place"
            assert sorted(await hashes(client)) == sorted(redis.alive), "and none without its payload"
            outputs = await client.keys(Keys.of(client).output + "*")
            stored = {key.decode().removeprefix(Keys.of(client).output) for key in outputs}
            assert {name for name in stored if not name.startswith("part-")} <= redis.alive, "it goes with its request"
    finally:
        await redis.handles.close()
        await client.aclose()


async def scenario_with_losses(url: str, done: list[tuple]) -> None:  # type: ignore[type-arg]
    client = connection.connect(url)
    clock = ManualClock()
    trial = Trial(clock, Handles(clock, client))
    try:
        for operation in done:
            if operation[0] == "lose":
                kind, name = operation[1]
                prefixes = {"hash": Keys.of(client).request, "sums": Keys.of(client).waiting}
                await client.delete(prefixes[kind] + name)
                continue
            await trial.apply(operation)
            for name, backlog in (await trial.queue.backlogs(TIERS)).items():
                if await client.exists(Keys.of(client).waiting + name):
                    assert backlog == await sums(client, name)
        for name in TIERS:  # lost sums are computed anew with the next move
            assert await trial.queue.put([make_request(f"last-{name}", name)]) is None
        assert await trial.queue.backlogs(TIERS) == {name: await sums(client, name) for name in TIERS}
    finally:
        await trial.handles.close()
        await client.aclose()


PUT = ("put", "realtime", [("a", START_MS, 3, 4, "")], None, None, None)


@example(done=[PUT, ("claim", "w1", {"realtime": 1}, 1.0, None, {}), ("advance", 2.5), ("requeue_expired",)] * 2)
@given(done=st.lists(operations, min_size=5, max_size=30))
def test_both_queues_agree_and_conserve(valkey_server: Store, done: list[tuple]) -> None:  # type: ignore[type-arg]
    valkey_server.empty()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(scenario(valkey_server.url, done))


@settings(max_examples=settings().max_examples // 2)
@given(done=st.lists(st.one_of(operations, losses), min_size=5, max_size=30))
def test_the_sums_are_right_whatever_keys_are_lost(valkey_server: Store, done: list[tuple]) -> None:  # type: ignore[type-arg]
    valkey_server.empty()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(scenario_with_losses(valkey_server.url, done))
