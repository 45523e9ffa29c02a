"""A whole worker in front of a modeled server, in virtual time: isolation, hang-ups, faults, conservation."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from engine.step_time.cost import StepCost
from engine.streaming import UpstreamBusy, UpstreamUnusable
from scheduler.client.client import SchedulerClient
from scheduler.client.rejection import Rejected
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.drivers.streams.core import StreamCore
from scheduler.drivers.streams.driver import StreamDriver
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue, _Output
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.request import Delivery, EventKind, Request, TokenEvent
from scheduler.virtual_time import VirtualClock
from scheduler.worker.checkpoints import CHECKPOINT_S
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import SchedulerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.drivers.streams.modeled_upstream import ModeledUpstream, token_at
from tests.scheduler.world import run_bounded

T = TypeVar("T")
# About vLLM on two cores with a model of 135 M parameters.
CPU = StepCost(step_s=0.019, prefill_token_s=0.0008, attend_s=0.0, context_token_s=0.0, decode_s=0.00033)


@dataclass
class Answer:
    request: Request
    submitted_s: float
    events: list[TokenEvent] = field(default_factory=list)
    first_token_s: float | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.submitted_s

    @property
    def is_right(self) -> bool:
        expected = [token_at(self.request.prompt_token_ids, i) for i in range(self.request.sampling.max_tokens)]
        return self.token_ids == expected and self.events[-1].kind is EventKind.FINISHED


@dataclass
class World:
    clock: VirtualClock
    queue: MemoryQueue
    registry: MemoryWorkerRegistry
    client: SchedulerClient
    core: StreamCore
    upstream: ModeledUpstream
    loop: SchedulerLoop
    running: "asyncio.Task[None]"
    tiers: TierSet

    async def ask(
        self, name: str, tier: str = "realtime", prompt: int = 32, max_tokens: int = 8, **more: Any
    ) -> Answer:
        now_ms = self.clock.wall_ms()
        more.setdefault("deadline_ms", now_ms + self.tiers[tier].deadline_ms)
        request = make_request(name, tier, prompt, max_tokens, arrival_ms=now_ms, **more)
        answer = Answer(request, self.clock.now())
        stream = await self.client.submit([request])
        assert not isinstance(stream, Rejected), stream
        async with stream:
            async for event in stream:
                answer.events.append(event)
                if event.token_ids and answer.first_token_s is None:
                    answer.first_token_s = self.clock.now()
        return answer

    async def closed_loop(self, name: str, seconds: float, **request: Any) -> list[Answer]:
        """Ask again and again; return the answers that came."""
        answers, until_s = [], self.clock.now() + seconds
        while self.clock.now() < until_s:
            answers.append(await self.ask(f"{name}-{len(answers)}", **request))
        return answers


def play(story: Callable[[World], Awaitable[T]], *, tiers: TierSet | None = None, **options: Any) -> T:
    """Play `story` in virtual time, then drain the worker, and check that nothing is left over."""
    core_options = {key: options.pop(key) for key in ("max_in_flight", "stall_s") if key in options}

    async def main() -> T:
        clock, of_tiers = VirtualClock(), tiers or make_tiers()
        queue, events, registry = MemoryQueue(clock), MemoryEventChannel(), MemoryWorkerRegistry(clock)
        upstream = ModeledUpstream(clock, **options)
        serving = asyncio.create_task(upstream.run())
        core = StreamCore(of_tiers, upstream, SLAController(of_tiers), **core_options)
        metrics = SchedulerMetrics(CollectorRegistry(), of_tiers)
        identity = WorkerIdentity("worker", ("model",), clock.wall_ms())
        of_worker = queue.for_worker("worker")
        loop = build_loop(StreamDriver(core, upstream), of_worker, events, registry, metrics, clock, identity)
        running = asyncio.create_task(loop.run())
        client = SchedulerClient(queue, events, registry, of_tiers, clock, "gateway")
        await asyncio.sleep(0)
        await client.start()
        world = World(clock, queue, registry, client, core, upstream, loop, running, of_tiers)
        try:
            result = await story(world)
        finally:
            await client.close()
            loop.drain()
        await running
        serving.cancel()
        assert len(core.held) == core.num_in_flight == 0 and not upstream.running and not upstream.waiting
        counts = core.held.counts
        assert counts["accepted"] == sum(counts[k] for k in ("finished", "failed", "cancelled", "released"))
        return result

    return run_bounded(main())


def at(answers: list[Answer], share: float) -> float:
    times = sorted(answer.ttft_s for answer in answers)
    return times[min(len(times) - 1, int(share * len(times)))]


async def chats(world: World, count: int, every_s: float = 0.5) -> list[Answer]:
    """Ask `count` chats at a fixed rate, whether the earlier ones have ended or not."""
    asked = []
    for number in range(count):
        request = world.ask(f"chat-{number}", prompt=32 + 13 * number % 96, max_tokens=32)
        asked.append(asyncio.create_task(request))
        await world.clock.sleep(every_s * (0.7 + 0.6 * (number * 37 % 100) / 100))
    return await asyncio.gather(*asked)


async def bulk(world: World, streams: int, seconds: float) -> list[Answer]:
    loops = [
        world.closed_loop(f"bulk-{i}", seconds, tier="bulk", prompt=64 + 31 * i % 192, max_tokens=128, temperature=0.0)
        for i in range(streams)
    ]
    return [answer for answers in await asyncio.gather(*loops) for answer in answers]


def test_answers_are_whole_and_right() -> None:
    async def story(world: World) -> list[Answer]:
        return await asyncio.gather(*(world.ask(f"r{i}", max_tokens=5 + i) for i in range(20)))

    assert all(answer.is_right for answer in play(story))


def test_chat_beside_bulk_is_nearly_as_fast_as_alone() -> None:
    async def alone(world: World) -> tuple[list[Answer], list[Answer]]:
        return await chats(world, 40), []

    async def beside(world: World) -> tuple[list[Answer], list[Answer]]:
        flood = asyncio.create_task(bulk(world, 64, 27.0))
        await world.clock.sleep(5.0)
        asked = await chats(world, 40)
        num_at_most = 0.055 * world.core.recompute.num_computed
        assert world.core.recompute.num_recomputed <= num_at_most, "at most 5 % is computed again"
        return asked, await flood

    async def only_bulk(world: World) -> tuple[list[Answer], list[Answer]]:
        return [], await bulk(world, 64, 27.0)

    single, _ = play(alone, cost=CPU, noise=0.1)
    mixed, answers = play(beside, cost=CPU, noise=0.1)
    _, undisturbed = play(only_bulk, cost=CPU, noise=0.1)
    assert all(answer.is_right for answer in (*single, *mixed, *answers))
    assert at(mixed, 0.5) <= 1.5 * at(single, 0.5)
    assert at(mixed, 0.99) <= 2.5 * at(single, 0.99)
    assert len(answers) >= 0.7 * len(undisturbed)


def test_the_servers_own_queue_stays_empty_once_its_places_are_known() -> None:
    async def story(world: World) -> int:
        flood = asyncio.create_task(bulk(world, 40, 14.0))
        await world.clock.sleep(10.0)
        most = 0
        for _ in range(40):
            await world.clock.sleep(0.1)
            most = max(most, len(world.upstream.waiting))
        await flood
        return most

    assert play(story, places=8) <= 2


def test_bulk_is_hung_up_for_a_first_token_at_risk_and_continued() -> None:
    """All places of the server are taken by bulk when a chat arrives: it would wait there for seconds."""

    async def story(world: World) -> tuple[list[Answer], list[Answer]]:
        flood = asyncio.create_task(bulk(world, 8, 20.0))
        await world.clock.sleep(15.0)
        assert len(world.upstream.running) == 8
        asked = await chats(world, 8, every_s=0.3)
        return asked, await flood

    async def run(world: World) -> tuple[list[Answer], list[Answer], int]:
        asked, answers = await story(world)
        continued = [r for r in world.upstream.opened if r.output_token_ids]
        assert all(r.sampling.max_tokens > len(r.output_token_ids) >= 16 for r in continued)
        return asked, answers, len(continued)

    asked, answers, num_continued = play(run, places=8, max_in_flight=8)
    assert all(answer.is_right for answer in (*asked, *answers))
    assert num_continued >= 1
    assert at(asked, 0.99) < 1.0


@pytest.mark.parametrize("sampling", [{"presence_penalty": 0.5}, {"temperature": 1.0, "is_seeded": True}])
def test_what_cannot_be_continued_faithfully_is_finished_instead(sampling: dict[str, Any]) -> None:
    async def story(world: World) -> int:
        async def ask(number: int) -> Answer:
            request = make_request(f"b{number}", "bulk", 32, 100, arrival_ms=world.clock.wall_ms(), **kinds)
            stream = await world.client.submit([msgspec.structs.replace(request, is_seeded=is_seeded)])
            assert not isinstance(stream, Rejected)
            async with stream:
                events = [event async for event in stream]
            return Answer(request, 0.0, events)

        flood = [asyncio.create_task(ask(i)) for i in range(8)]
        await world.clock.sleep(1.0)
        await world.ask("chat")
        assert all(answer.is_right for answer in await asyncio.gather(*flood))
        return sum(bool(r.output_token_ids) for r in world.upstream.opened)

    kinds = dict(sampling)
    is_seeded = bool(kinds.pop("is_seeded", False))
    assert play(story, places=8, max_in_flight=8) == 0


def test_a_server_that_dies_in_mid_stream_loses_nothing() -> None:
    async def story(world: World) -> list[Answer]:
        asked = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=200, temperature=0.0)) for i in range(10)]
        await world.clock.sleep(1.0)
        assert world.upstream.running
        world.upstream.die()
        await world.clock.sleep(1.5)
        world.upstream.is_up = True
        return await asyncio.gather(*asked)

    assert all(answer.is_right for answer in play(story))


@pytest.mark.parametrize("how", ["dies", "freezes", "is away"])
def test_an_answer_that_cannot_go_on_where_it_ended_ends_with_an_error(how: str) -> None:
    """The client has its beginning, and a new one would be another. What nobody has seen yet begins again."""

    async def story(world: World) -> tuple[Answer, Answer]:
        world.upstream.repeats = False
        penalised = {"max_tokens": 200, "presence_penalty": 0.5}
        seen = asyncio.create_task(world.ask("seen", "bulk", **penalised))
        unseen = asyncio.create_task(world.ask("unseen", "bulk", delivery=Delivery.AT_END, **penalised))
        await world.clock.sleep(1.0)
        assert len(world.upstream.running) == 2
        if how == "dies":
            world.upstream.die()
        else:
            world.upstream.is_frozen, world.upstream.is_up = True, how == "freezes"
        await world.clock.sleep(8.0)
        world.upstream.is_up = True
        world.upstream.thaw()
        return await seen, await unseen

    seen, unseen = play(story, stall_s=5.0)
    assert seen.events[-1].kind is EventKind.UNAVAILABLE
    assert "cannot be continued" in seen.events[-1].error
    assert 0 < len(seen.token_ids) < 200
    assert unseen.is_right


def test_a_server_that_is_away_for_long_makes_the_worker_look_dead() -> None:
    """Bulk waits in the store; what only this worker can continue stays here; chats are refused."""

    async def story(world: World) -> None:
        begun = asyncio.create_task(world.ask("begun", "bulk", max_tokens=300, temperature=0.0))
        await world.clock.sleep(1.0)
        world.upstream.die()
        await world.clock.sleep(0.1)
        chat = asyncio.create_task(world.ask("chat"))
        later = asyncio.create_task(world.ask("later", "bulk"))
        await world.clock.sleep(20.0)
        assert await world.registry.workers() == []
        assert (await chat).events[-1].kind is EventKind.UNAVAILABLE
        assert (await world.queue.depths(["bulk"]))["bulk"] == 1
        assert [state.id for state in world.core.held.states] == ["begun"]
        world.upstream.is_up = True
        assert (await begun).is_right and (await later).is_right
        assert [r.seq_id for r in world.upstream.opened].count("begun") == 2

    play(story)


def test_a_server_that_turns_everyone_away_burns_no_attempts() -> None:
    """A key that the server takes no longer: all work waits in the store until the server serves us again."""

    async def story(world: World) -> None:
        world.upstream.refusals[""] = UpstreamUnusable("The server answered 401: no such key")
        asked = [asyncio.create_task(world.ask(f"b{i}", "bulk")) for i in range(10)]
        await world.clock.sleep(60.0)
        assert (await world.queue.depths(["bulk"]))["bulk"] == 10
        assert await world.registry.workers() == []
        assert len(world.upstream.refused) <= 10, "nothing is sent while a trial fails"
        del world.upstream.refusals[""]
        assert all(answer.is_right for answer in await asyncio.gather(*asked))

    with capture_logs() as logs:
        play(story)
    [said] = [line for line in logs if line["log_level"] == "error"]
    assert "401: no such key" in said["reason"]


def test_a_request_that_alone_is_turned_away_is_given_up_and_others_go_on() -> None:
    """Such as one whose text a firewall before the server does not let pass."""

    async def story(world: World) -> tuple[Answer, list[Answer]]:
        world.upstream.refusals["bad"] = UpstreamUnusable("The server answered 403: blocked")
        flood = asyncio.create_task(bulk(world, 4, 10.0))
        bad = await world.ask("bad", "bulk")
        return bad, await flood

    bad, others = play(story)
    assert bad.events[-1].kind is EventKind.UNAVAILABLE
    assert "403: blocked The request was given up after 4 attempts." in bad.events[-1].error
    assert all(answer.is_right for answer in others)


def test_a_server_that_sends_nothing_is_hung_up_and_asked_again() -> None:
    async def story(world: World) -> Answer:
        world.upstream.is_frozen = True
        asked = asyncio.create_task(world.ask("b", "bulk"))
        await world.clock.sleep(7.0)
        assert len(world.upstream.opened) == 2, "after 5 s without a token, there is another stream"
        world.upstream.thaw()
        return await asked

    assert play(story, stall_s=5.0).is_right


def test_after_its_last_attempt_a_request_ends_with_a_clear_error() -> None:
    async def story(world: World) -> Answer:
        world.upstream.is_frozen = True
        return await world.ask("b", "bulk")

    answer = play(story, stall_s=2.0)
    assert answer.events[-1].kind is EventKind.UNAVAILABLE
    assert "sent no token for 2 s. The request was given up after 4 attempts." in answer.events[-1].error


def test_refusals_lower_what_is_sent_and_lose_nothing() -> None:
    async def story(world: World) -> tuple[list[Answer], float]:
        world.upstream.refuses = True
        return await bulk(world, 30, 20.0), world.core.limit.value

    answers, limit = play(story, places=6)
    assert answers and all(answer.is_right for answer in answers)
    assert limit <= 10


def test_a_request_that_is_always_refused_as_busy_stops_no_others_and_is_given_up() -> None:
    async def story(world: World) -> tuple[list[Answer], list[Answer]]:
        flood = asyncio.create_task(bulk(world, 4, 60.0))
        await world.clock.sleep(1.0)
        bad = [await world.ask(name, "bulk", job_part="a line") for name in ("bad", "again")]
        return bad, await flood

    async def undisturbed(world: World) -> tuple[list[Answer], list[Answer]]:
        return [], await bulk(world, 4, 60.0)

    async def refusing(world: World) -> tuple[list[Answer], list[Answer]]:
        world.upstream.refusals |= dict.fromkeys(("bad", "again"), UpstreamBusy("The server answered 429: no.", 5.0))
        bad, others = await story(world)
        assert world.upstream.refused.count("bad") <= 8
        assert world.upstream.refused.count("again") == 1, "what was given up is remembered by its name"
        return bad, others

    bad, others = play(refusing)
    _, usual = play(undisturbed)
    for answer in bad:
        assert answer.events[-1].kind is EventKind.UNAVAILABLE
        assert "429: no. The request was given up" in answer.events[-1].error
    assert all(answer.is_right for answer in others)
    assert len(others) >= 0.7 * len(usual), "the first refusals pause all"


def test_a_request_that_is_refused_until_its_deadline_ends_then() -> None:
    async def story(world: World) -> tuple[Answer, float]:
        world.upstream.refusals[""] = UpstreamBusy("The server answered 429: no quota.")
        answer = await world.ask("late", "bulk", deadline_ms=world.clock.wall_ms() + 20_000)
        return answer, world.clock.now() - answer.submitted_s

    answer, seconds = play(story)
    assert answer.events[-1].kind is EventKind.UNAVAILABLE
    assert 20 < seconds < 25


def test_a_busy_server_keeps_its_requests_until_it_has_a_place() -> None:
    """However many refusals there are: all are refused alike."""

    async def story(world: World) -> list[Answer]:
        world.upstream.refusals[""] = UpstreamBusy("The server answered 503: no place.")
        asked = [asyncio.create_task(world.ask(f"b{i}", "bulk")) for i in range(10)]
        await world.clock.sleep(60.0)
        assert len(world.upstream.refused) > 10
        del world.upstream.refusals[""]
        return await asyncio.gather(*asked)

    assert all(answer.is_right for answer in play(story))


def test_a_bug_in_the_probe_ends_the_worker_and_not_the_probe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: ModeledUpstream) -> None:
        raise ValueError("a bug")

    async def story(world: World) -> None:
        await world.running

    monkeypatch.setattr(ModeledUpstream, "load", fail)
    with pytest.raises(ValueError, match="a bug"):
        play(story)


def test_a_cancelled_request_is_hung_up() -> None:
    async def story(world: World) -> None:
        request = make_request("r", "bulk", 32, 500, arrival_ms=world.clock.wall_ms())
        stream = await world.client.submit([request])
        assert not isinstance(stream, Rejected)
        async with stream:
            await world.clock.sleep(1.0)
            assert world.upstream.running
        await world.clock.sleep(1.0)
        assert not world.upstream.running

    play(story)


def test_a_stopped_worker_gives_its_requests_back() -> None:
    async def story(world: World) -> None:
        asked = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=400)) for i in range(3)]
        await world.clock.sleep(1.0)
        world.loop.stop()
        await world.running
        assert (await world.queue.depths(["bulk"]))["bulk"] == 3
        assert not world.upstream.running
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    play(story)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_bulk_is_checkpointed_and_a_claim_continues_from_its_checkpoint() -> None:
    async def story(world: World) -> None:
        outputs = world.queue._shared.outputs
        asked = asyncio.create_task(world.ask("first", "bulk", max_tokens=300, delivery=Delivery.AT_END))
        await world.clock.sleep(CHECKPOINT_S + 0.1)
        saved = outputs["first"].token_ids
        assert 32 <= len(saved) < 300
        assert (await asked).is_right
        world.upstream.is_up = False
        await world.clock.sleep(4.0)  # so that the worker notices it, and claims nothing
        again = asyncio.create_task(world.ask("second", "bulk", max_tokens=300, delivery=Delivery.AT_END))
        penalised = asyncio.create_task(
            world.ask("penalised", "bulk", max_tokens=300, delivery=Delivery.AT_END, frequency_penalty=0.5)
        )
        await world.clock.sleep(0.1)
        for name in ("second", "penalised"):
            outputs[name] = _Output(token_ids=saved)
        world.upstream.is_up = True
        assert (await again).is_right and (await penalised).is_right
        continued = {stream.seq_id: stream.output_token_ids for stream in world.upstream.opened}
        # Penalties would not know the earlier tokens.
        assert continued == {"first": (), "second": saved, "penalised": ()}

    play(story)
