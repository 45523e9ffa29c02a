"""A model of the whole protocol over the real scripts: gateway, workers and a store that may lose its last writes.

Workers answer differently at each claim, stall, die, are requeued while they live, lose replies and go on. In every
history, each answer is one generation or a continuation of what its gateway had received; no request is lost, unless
the store has lost it; and none is acknowledged twice.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from scheduler.client.admission import Admission
from scheduler.client.open_requests import OpenRequests
from scheduler.client.token_stream import TokenStream
from scheduler.queue.redis import RedisQueue
from scheduler.queue.scripts import ClaimedRow
from scheduler.request import Checkpoint, Delivery, EventKind, TokenEvent
from scheduler.store import connection
from scheduler.store.keys import Keys
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.model_worker import LEASE_S, MAX_TOKENS, ModelWorker
from tests.scheduler.queue.harness import START_MS, ManualClock

WORKERS = ("w1", "w2")
STEPS = 20  # of a history
worker = st.sampled_from(WORKERS)
TIERS = make_tiers()


@dataclass
class Asked:
    """A request as its client sees it."""

    stream: TokenStream
    delivery: Delivery
    put_at: int  # number of failovers before
    tokens: list[int] = field(default_factory=list)
    end: EventKind | None = None


class Protocol(RuleBasedStateMachine):
    runner: asyncio.Runner
    client: Redis

    def __init__(self) -> None:
        super().__init__()
        self.run(self.client.flushall())
        self.numbers = itertools.count(1)
        self.clock = ManualClock()
        self.queue = RedisQueue(self.client, self.clock)
        self.workers = {name: ModelWorker(self._handle(name)) for name in WORKERS}
        self.open = OpenRequests(Admission(TIERS))
        self.asked: dict[str, Asked] = {}
        self.messages: list[list[TokenEvent]] = []  # published, and not yet read by the gateway
        self.prefixes: dict[int, tuple[int, ...]] = {}  # what was in front of each token when it was generated
        self.known: dict[str, int] = {}  # the newest fence that the gateway has seen, by request
        self.newest: dict[str, int] = {}  # the fence of the newest claim, by request
        self.acknowledged: dict[str, int] = {}  # the number of failovers before it
        self.failovers = 0
        self.snapshot: dict[bytes, tuple[bytes, int]] = {}
        self.read_lately: list[list[TokenEvent]] = []  # messages that the gateway has not removed yet
        self.kept: list[list[TokenEvent]] = []  # messages in the snapshot

    def _handle(self, name: str) -> RedisQueue:
        queue = RedisQueue(self.client, self.clock, name)
        queue._start_listening = lambda: None  # type: ignore[method-assign]
        return queue

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    # -- gateway -----------------------------------------------------------------------------------------------

    @initialize(deliveries=st.lists(st.sampled_from(Delivery), min_size=2, max_size=4))
    def begin(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.put(delivery)

    @precondition(lambda self: len(self.asked) < 6)
    @rule(delivery=st.sampled_from(Delivery))
    def put(self, delivery: Delivery) -> None:
        name = f"r{len(self.asked)}"
        request = make_request(name, max_tokens=MAX_TOKENS, delivery=delivery, deadline_ms=START_MS + len(self.asked))
        stream = TokenStream(self._cancel, [request])
        self.asked[name] = Asked(stream, delivery, self.failovers)
        self.open.add([name], stream)
        self.run(self.queue.put([request]))
        self.open.note_put([name])

    async def _cancel(self, request_ids: Any) -> None:
        await self.queue.cancel(request_ids)

    @precondition(lambda self: self.messages)
    @rule(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        self.read_lately = [*self.read_lately, *self.messages[:count]][-3:]
        for message in self.messages[:count]:
            for event in message:
                self._deliver(event)
            received, ended = self.open.received(message, 0.0)
            self.run(self._answer(received, ended))
        del self.messages[:count]
        self._receive()

    def _deliver(self, event: TokenEvent) -> None:
        """Let the gateway read one event. If it knows of a newer claim, the event changes nothing."""
        received = self.asked[event.request_id].stream._received[event.request_id]
        before, known = list(received), self.known.get(event.request_id, 0)
        self.open.deliver([event], 0.0)
        assert event.fence >= known or received == before
        self.known[event.request_id] = max(known, event.fence)

    async def _answer(self, received: list[Checkpoint], ended: list[str]) -> None:
        await self.queue.resume(received)
        await self.queue.cancel(ended)

    def _receive(self) -> None:
        for asked in self.asked.values():
            while asked.stream._events:
                event = asked.stream._events.pop(0)
                assert asked.end is None, "nothing comes after the end"
                assert event.index == len(asked.tokens)
                asked.tokens += event.token_ids
                asked.end = event.kind if event.is_last else None

    @rule()
    def check(self) -> None:
        """Look for requests that the store has lost, seconds after all messages until now have arrived."""
        self.read(99)
        checked = self.open.to_check()
        lost = self.open.lost(checked, self.run(self.queue.known(checked)) if checked else [])
        for name in lost:
            assert self.failovers > self.asked[name].put_at, "only a store that lost writes loses a request"
        self.open.fail(lost, "lost", 0.0)
        self._receive()

    # -- workers -----------------------------------------------------------------------------------------------

    @rule(
        name=worker,
        limit=st.sampled_from([0, 0, 1, 3]),
        loses_reply=st.booleans(),
        steps=st.integers(0, 3),
        saves=st.booleans(),
        acknowledges=st.booleans(),
        reads=st.booleans(),
    )
    def work(
        self,
        name: str,
        limit: int,
        loses_reply: bool,
        steps: int,
        saves: bool,
        acknowledges: bool,
        reads: bool,
    ) -> None:
        """Claim, generate, publish, checkpoint and acknowledge, or some of it; the gateway reads it, or not yet."""
        if limit:
            self.claim(name, limit, loses_reply)
        for _ in range(steps):
            self.step(name, saves, acknowledges)
        if reads:
            self.read(99)

    def claim(self, name: str, limit: int, loses_reply: bool) -> None:
        worker = self.workers[name]
        lost = self.run(self._claim_without_reply(worker, limit)) if loses_reply else []
        claimed = self.run(worker.queue.claim({"realtime": limit}, LEASE_S, 0))
        assert not lost or {row[0].decode() for row in lost} == {c.request.id for c in claimed}
        for one in claimed:
            self.newest[one.request.id] = one.fence
            if question := worker.begin(one):
                self.messages.append(question)

    async def _claim_without_reply(self, worker: ModelWorker, limit: int) -> list[ClaimedRow]:
        return await worker.claim_without_reply(limit, f"claim-{next(self.numbers)}", self.clock.wall_ms())

    def step(self, name: str, saves: bool, acknowledges: bool) -> None:
        """Generate a token of each request, publish, and acknowledge what has ended, at once or later."""
        worker = self.workers[name]
        if events := worker.step(self.numbers, self.prefixes):
            self.messages.append(events)
        if saves:
            self.run(worker.save())
        if acknowledges:
            self.acknowledge(name)

    def acknowledge(self, name: str) -> None:
        worker = self.workers[name]
        done = self.run(worker.queue.ack(worker.ended))
        for lease, was_held in zip(worker.ended, done, strict=True):
            if was_held:
                assert lease.fence == self.newest.get(lease.request_id, lease.fence), (
                    "only the newest claim is acknowledged"
                )
                before = self.acknowledged.get(lease.request_id)
                assert before is None or before < self.failovers, "acknowledged twice"
                self.acknowledged[lease.request_id] = self.failovers
        worker.ended.clear()

    @rule(name=worker)
    def renew(self, name: str) -> None:
        self.run(self.workers[name].renew())

    @rule(name=worker, releases=st.booleans())
    def stop(self, name: str, releases: bool) -> None:
        """End the worker: in order, or at once and without a word."""
        worker = self.workers[name]
        if releases:
            self.run(worker.save())
            self.run(worker.release())
        self.workers[name] = ModelWorker(self._handle(name))

    @rule(name=worker)
    def requeue(self, name: str) -> None:
        """Another worker finds this one silent, whether it is dead or not."""
        self.run(self.queue.requeue_worker(name))

    @rule(name=worker, other=worker, reads=st.booleans())
    def stall(self, name: str, other: str, reads: bool) -> None:
        """The worker stands still, another one takes over what it holds, and it goes on before it renews its leases."""
        self.requeue(name)
        self.claim(other, 3, False)
        if reads:
            self.read(99)
        self.step(name, True, True)

    @rule()
    def let_leases_expire(self) -> None:
        self.clock.advance(LEASE_S + 1)
        self.run(self._requeue_expired())

    async def _requeue_expired(self) -> None:
        await self.queue.requeue_expired(await self.queue.expired_leases(LEASE_S))

    # -- the store ---------------------------------------------------------------------------------------------

    @rule()
    def replicate(self) -> None:
        """Let the replica have all writes until now."""
        self.snapshot = self.run(self._dump())
        self.kept = [*self.read_lately, *self.messages]

    async def _dump(self) -> dict[bytes, tuple[bytes, int]]:
        found = await self.client.keys("*")
        return {key: (await self.client.dump(key), max(0, await self.client.pttl(key))) for key in found}

    @precondition(lambda self: self.failovers < 2)
    @rule()
    def fail_over(self) -> None:
        """Go on with the replica: what was written since the last `replicate` is lost, and read messages come again."""
        self.run(self._restore())
        self.messages = list(self.kept)
        self.failovers += 1
        self.newest.clear()  # the store may not know the newest claims any more
        self.clock.advance(1)  # no failover is faster

    async def _restore(self) -> None:
        await self.client.flushdb()
        for key, (value, ttl_ms) in self.snapshot.items():
            await self.client.restore(key, ttl_ms, value)
        # the new primary has another replication id
        await self.client.set(Keys.of(self.client).epoch, f"replica {self.failovers}")

    # -- laws --------------------------------------------------------------------------------------------------

    @invariant()
    def no_answer_is_mixed(self) -> None:
        for asked in self.asked.values():
            for i, token in enumerate(asked.tokens):
                assert self.prefixes[token] == tuple(asked.tokens[:i]), "each token continues what is in front of it"
            if asked.end is EventKind.FINISHED:
                assert len(asked.tokens) == MAX_TOKENS
            assert asked.end is not EventKind.FAILED or self.failovers > asked.put_at + 1

    def teardown(self) -> None:
        """Let everything go on to its end: then each request has ended, as finished unless the store lost writes."""
        for name in WORKERS:
            self.requeue(name)
            self.renew(name)
        for _ in range(60):
            if all(asked.end is not None for asked in self.asked.values()):
                break
            for name in WORKERS:
                self.claim(name, 9, False)
                self.read(99)
                self.claim(name, 9, False)
                self.step(name, False, True)
                self.read(99)
            self.check()
        for name, asked in self.asked.items():
            assert asked.end is not None, f"{name} is lost"
            assert asked.end is EventKind.FINISHED or self.failovers > asked.put_at, asked.end
        self.no_answer_is_mixed()


@pytest.mark.parametrize("examples", [300, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_no_history_of_the_protocol_loses_doubles_or_mixes(valkey_url: str, examples: int) -> None:
    with asyncio.Runner() as loop:
        store = connection.connect(valkey_url)

        class OnThisStore(Protocol):
            runner, client = loop, store

        # Without shrinking, which takes minutes.
        bounds = settings(max_examples=examples, stateful_step_count=STEPS, phases=[Phase.generate])
        run_state_machine_as_test(OnThisStore, settings=bounds)
        loop.run(store.aclose())
