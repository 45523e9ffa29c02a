"""The bytes that parts of different versions exchange. A change here concerns everyone who upgrades one part after the
other: "Versions side by side" in docs/operations.md says what must hold."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from msgspec.structs import replace as replaced
from redis.asyncio import Redis

from engine.interface import FinishReason, SamplingParams, TokenLogprobs
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.registry.worker_status import Beat, TierCapacity, TierStatus, WorkerStatus
from scheduler.request import (
    CHAT_VERSION,
    PAIR_VERSION,
    USUAL_VERSION,
    VERSION,
    Delivery,
    EventKind,
    Receipt,
    Request,
    TokenEvent,
)
from scheduler.store.keys import Keys
from scheduler.tasks import task as tasks_format
from scheduler.tasks.queue import TaskQueue
from scheduler.tasks.task import EndedTask, Task, TaskState
from tests.scheduler.queue.harness import ManualClock
from tests.scheduler.tasks.builders import make_task

LEASE_S = 10.0

PLAIN = Request("r-0", "realtime", (5, 300), SamplingParams(max_tokens=8), 1_700_000_000_000, 1_700_000_001_000, "g")
FULL = Request(
    "r-0",
    "batch",
    (5, 70_000),
    SamplingParams(
        max_tokens=8,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((5, -1.0),),
        allowed_token_ids=(1, 2),
        bad_words=((3, 4),),
        min_tokens=1,
        stop_token_ids=(2,),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        grammar="{}",
        adapter="a",
    ),
    1_700_000_000_000,
    1_700_000_001_000,
    "g",
    Delivery.AT_END,
    "salt",
    True,
    True,
    500,
    "part",
    "00-0-0-01",
    USUAL_VERSION,
)
PAIR = replaced(PLAIN, version=PAIR_VERSION, second_from=1)
WHOLE = replaced(PLAIN, is_whole=True)
CHAT = replaced(PLAIN, version=CHAT_VERSION, chat='{"messages":[]}')
SCORE = TokenEvent("r-0", EventKind.FINISHED, 0, (0,), FinishReason.LENGTH, vector=b"\x00\x00\x00?")
EVENTS = [
    TokenEvent("r-0", EventKind.TOKENS, 0, (5, 300), fence=1_700_000_000_001),
    TokenEvent(
        "r-0",
        EventKind.FINISHED,
        2,
        (9,),
        FinishReason.LENGTH,
        cached_tokens=16,
        logprobs=(TokenLogprobs(9, -0.5, ((9, -0.5),)),),
        receipt=Receipt("w", 1.0, 2.0, 3.0, 0.0, 1, 0, 2.5),
    ),
    TokenEvent("r-1", EventKind.FAILED, error="It failed.", code="worker_died"),
    TokenEvent("r-2", EventKind.TAKEN_OVER, fence=7),
]
STATUS = WorkerStatus(
    "w", ("m",), 512, 1000, 1, (2,), "cpu", {"bulk": TierStatus(1, 2, 3, 4.0, 5.0, TierCapacity())}, 9
)
TASKS = [
    Task("task_0", "realtime", "default", 1_700_000_000_000),
    Task(
        *("task_1", "bulk", "flex", 1_700_000_000_000, b"[1]", "team", 60_000),
        *({"a": "b"}, ("It failed.",), 1000, "00-0-0-01", tasks_format.VERSION),
    ),
]

GOLDEN = {
    "plain": (
        PLAIN,
        "de0007a26964a3722d30a474696572a87265616c74696d65b070726f6d70745f746f6b656e5f6964739205cd012ca873616d706c"
        "696e67de0001aa6d61785f746f6b656e7308aa6172726976616c5f6d73cf0000018bcfe56800ab646561646c696e655f6d73"
        "cf0000018bcfe56be8a87265706c795f746fa167",
    ),
    "full": (
        FULL,
        "de000fa26964a3722d30a474696572a56261746368b070726f6d70745f746f6b656e5f6964739205ce00011170a873616d706c69"
        "6e67de0013aa6d61785f746f6b656e7308ab74656d7065726174757265cb3fe0000000000000a5746f705f70cb3feccccccc"
        "cccccda5746f705f6b05a56d696e5f70cb3fb999999999999aa47365656407b070726573656e63655f70656e616c7479cb3f"
        "b999999999999ab16672657175656e63795f70656e616c7479cb3fc999999999999ab272657065746974696f6e5f70656e61"
        "6c7479cb3ff199999999999aaa6c6f6769745f62696173919205cbbff0000000000000b1616c6c6f7765645f746f6b656e5f"
        "696473920102a96261645f776f72647391920304aa6d696e5f746f6b656e7301ae73746f705f746f6b656e5f6964739102aa"
        "69676e6f72655f656f73c3a86c6f6770726f627302af70726f6d70745f6c6f6770726f627300a76772616d6d6172a27b7da7"
        "61646170746572a161aa6172726976616c5f6d73cf0000018bcfe56800ab646561646c696e655f6d73cf0000018bcfe56be8"
        "a87265706c795f746fa167a864656c6976657279a661745f656e64aa63616368655f73616c74a473616c74ad77616e74735f"
        "72656365697074c3a969735f736565646564c3a9757267656e745f6d73cd01f4a86a6f625f70617274a470617274ab747261"
        "6365706172656e74a930302d302d302d3031a776657273696f6e01",
    ),
    "events": (
        EVENTS,
        "9484aa726571756573745f6964a3722d30a46b696e64a6746f6b656e73a9746f6b656e5f6964739205cd012ca566656e6365"
        "cf0000018bcfe5680188aa726571756573745f6964a3722d30a46b696e64a866696e6973686564a5696e64657802a9746f6b"
        "656e5f6964739109ad66696e6973685f726561736f6ea66c656e677468ad6361636865645f746f6b656e7310a86c6f677072"
        "6f62739183a8746f6b656e5f696409a76c6f6770726f62cbbfe0000000000000a3746f70919209cbbfe0000000000000a772"
        "65636569707488a6776f726b6572a177a871756575655f6d73cb3ff0000000000000aa70726566696c6c5f6d73cb40000000"
        "00000000a96465636f64655f6d73cb4008000000000000a97061757365645f6d73cb0000000000000000ab707265656d7074"
        "696f6e7301ab73757370656e73696f6e7300a9656e67696e655f6d73cb400400000000000084aa726571756573745f6964a3"
        "722d31a46b696e64a66661696c6564a56572726f72aa4974206661696c65642ea4636f6465ab776f726b65725f6469656483"
        "aa726571756573745f6964a3722d32a46b696e64aa74616b656e5f6f766572a566656e636507",
    ),
    "tasks": (
        TASKS,
        "9284a26964a67461736b5f30a474696572a87265616c74696d65ac736572766963655f74696572a764656661756c74aa6172"
        "726976616c5f6d73cf0000018bcfe568008ba26964a67461736b5f31a474696572a462756c6bac736572766963655f746965"
        "72a4666c6578aa6172726976616c5f6d73cf0000018bcfe56800a5696e707574c4035b315da56f776e6572a47465616da76b"
        "6565705f6d73cdea60a86d6574616461746181a161a162a86661696c7572657391aa4974206661696c65642eaa74696d656f"
        "75745f6d73cd03e8ab7472616365706172656e74a930302d302d302d3031",
    ),
    "pair": (
        PAIR,
        "de0009a26964a3722d30a474696572a87265616c74696d65b070726f6d70745f746f6b656e5f6964739205cd012ca873616d706c"
        "696e67de0001aa6d61785f746f6b656e7308aa6172726976616c5f6d73cf0000018bcfe56800ab646561646c696e655f6d73cf00"
        "00018bcfe56be8a87265706c795f746fa167a776657273696f6e02ab7365636f6e645f66726f6d01",
    ),
    "whole": (
        WHOLE,
        "de0008a26964a3722d30a474696572a87265616c74696d65b070726f6d70745f746f6b656e5f6964739205cd012ca873616d70"
        "6c696e67de0001aa6d61785f746f6b656e7308aa6172726976616c5f6d73cf0000018bcfe56800ab646561646c696e655f6d73"
        "cf0000018bcfe56be8a87265706c795f746fa167a869735f77686f6c65c3",
    ),
    "chat": (
        CHAT,
        "de0009a26964a3722d30a474696572a87265616c74696d65b070726f6d70745f746f6b656e5f6964739205cd012ca873616d70"
        "6c696e67de0001aa6d61785f746f6b656e7308aa6172726976616c5f6d73cf0000018bcfe56800ab646561646c696e655f6d73"
        "cf0000018bcfe56be8a87265706c795f746fa167a776657273696f6e03a463686174af7b226d65737361676573223a5b5d7d",
    ),
    "score": (
        SCORE,
        "85aa726571756573745f6964a3722d30a46b696e64a866696e6973686564a9746f6b656e5f6964739100ad66696e6973685f7265"
        "61736f6ea66c656e677468a6766563746f72c4040000003f",
    ),
    "status": (
        STATUS,
        "8fa9776f726b65725f6964a177ab6d6f64656c5f6e616d657391a16dad6d61785f6d6f64656c5f6c656ecd0200aa766f6361"
        "625f73697a65cd03e8aa737461727465645f6d7301ad656f735f746f6b656e5f6964739102a6646576696365a3637075a574"
        "6965727381a462756c6b86a671756575656401a772756e6e696e6702aa62617463685f73697a6503ab6d61785f776169745f"
        "6d73cb4010000000000000ae66696e69736865645f7065725f73cb4014000000000000a863617061636974798aad70726f6d"
        "70745f746f6b656e7300ad6f75747075745f746f6b656e7300a6737465705f73cb0000000000000000aa736c6f74735f6672"
        "656500ab647261696e5f7065725f73cb0000000000000000b470726566696c6c5f746f6b656e735f7065725f73cb00000000"
        "00000000b36f75747075745f746f6b656e735f7065725f73cb0000000000000000ba77686f6c655f70726566696c6c5f746f"
        "6b656e735f7065725f73cb0000000000000000b977686f6c655f6f75747075745f746f6b656e735f7065725f73cb00000000"
        "00000000a96e756d5f656e64656400a561745f6d7309ab756e737570706f7274656490a462757379cb0000000000000000a8"
        "6b765f7573616765cb0000000000000000a46770757390ab6c6566745f73686172657390ab62617463685f6974656d7300",
    ),
    "beat": (Beat(9), "82a561745f6d7309ab62617463685f6974656d7300"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_stored_has_these_bytes(name: str) -> None:
    value, golden = GOLDEN[name]
    if name != "status":  # which may get fields that older gateways ignore
        assert msgspec.msgpack.encode(value).hex() == golden
    kind = list[type(value[0])] if isinstance(value, list) else type(value)  # type: ignore[misc]
    assert msgspec.msgpack.decode(bytes.fromhex(golden), type=kind) == value


async def claim(redis_client: Redis, changes: dict[str, object]) -> tuple[str, str]:
    """Put a request, change its stored payload, and claim it. Return why it cannot be read, and its gateway."""
    queue = RedisQueue(redis_client, ManualClock(), "w")
    await queue.put([PLAIN])
    key = Keys.of(redis_client).request + PLAIN.id
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(PLAIN))
    sampling = {**payload["sampling"], **changes.pop("sampling", {})}  # type: ignore[dict-item]
    await redis_client.hset(key, "payload", msgspec.msgpack.encode({**payload, **changes, "sampling": sampling}))
    [claimed] = await queue.claim({"realtime": 1}, 5)
    await queue.close()
    return claimed.unreadable, claimed.request.reply_to


async def test_a_request_that_needs_a_later_version_is_refused_with_the_names_of_what_is_unknown(
    redis_client: Redis,
) -> None:
    later: dict[str, object] = {"version": VERSION + 1, "voice": "alto", "sampling": {"entropy": 0.5}}
    assert await claim(redis_client, later) == ("this worker does not know entropy, voice", "g")


async def test_a_later_version_without_unknown_names_is_refused_by_its_number(redis_client: Redis) -> None:
    refused, _ = await claim(redis_client, {"version": VERSION + 1})
    assert refused == f"this worker does not know version {VERSION + 1}"


async def test_unknown_fields_that_need_no_later_version_change_nothing(redis_client: Redis) -> None:
    assert await claim(redis_client, {"version": VERSION, "note": 1}) == ("", "g")


@pytest.fixture
async def tasks(redis_client: Redis) -> AsyncIterator[TaskQueue]:
    queue = TaskQueue(redis_client, ManualClock(), "w")
    yield queue
    await queue.close()


async def test_a_task_that_cannot_be_read_becomes_a_dead_letter_of_its_owner(
    tasks: TaskQueue, redis_client: Redis
) -> None:
    readable, damaged = make_task(b"1"), make_task(b"2", owner="team")
    await tasks.put([readable], limit=10)
    await tasks.put([damaged], limit=10)
    key = Keys.of(redis_client).tasks.request + damaged.id
    await redis_client.hset(key, "payload", b"\x82\xa5owner\xa4team\xa2id\x01")
    [outline] = await tasks.find([damaged.id])
    assert outline is not None and (outline.task.owner, outline.task.is_readable) == ("team", False)
    [claimed] = await tasks.claim({"realtime": 5}, LEASE_S)
    assert (claimed.task, claimed.attempt) == (readable, 1)
    [letter] = await tasks.dead("team", 10) or []
    assert (letter.task.id, letter.state) == (damaged.id, TaskState.DEAD)
    assert letter.error.startswith("It cannot be read: Expected `str`")


async def test_a_task_that_needs_a_later_version_is_left_to_it_with_the_names_of_what_is_unknown(
    tasks: TaskQueue, redis_client: Redis
) -> None:
    later = make_task(b"2", owner="team")
    await tasks.put([later], limit=10)
    payload = msgspec.msgpack.encode(
        {**msgspec.structs.asdict(later), "version": tasks_format.VERSION + 1, "voice": "alto"}
    )
    await redis_client.hset(Keys.of(redis_client).tasks.request + later.id, "payload", payload)
    assert await tasks.claim({"realtime": 5}, LEASE_S) == []
    [letter] = await tasks.dead("team", 10) or []
    assert letter.error == "It cannot be read: this worker does not know voice."
    assert not letter.task.is_readable and letter.task.service_tier == later.service_tier
    stored = await redis_client.hmget(Keys.of(redis_client).tasks.ended + later.id, ["task", "input"])
    assert stored == [payload, b"2"], "a later version can retry it whole"


async def test_an_ended_task_whose_record_cannot_be_read_keeps_its_result_and_its_neighbours_are_found(
    tasks: TaskQueue, redis_client: Redis
) -> None:
    await tasks.put([make_task(owner="team") for _ in range(3)], limit=10)
    claims = await tasks.claim({"realtime": 3}, LEASE_S)
    await tasks.end([EndedTask(claimed, claimed.task, b"7") for claimed in claims])
    damaged, unknown, readable = (claimed.task for claimed in claims)
    await redis_client.hset(Keys.of(redis_client).tasks.ended + damaged.id, "task", b"\x82\xa5owner\xa4team\xa2id\x01")
    await redis_client.hset(Keys.of(redis_client).tasks.ended + unknown.id, "state", "paused")
    first, second, third = await tasks.find([damaged.id, unknown.id, readable.id])
    assert first is not None and (first.state, first.result, first.task.owner) == (TaskState.DONE, b"7", "team")
    assert second is None
    assert third is not None and third.result == b"7"


async def announce_as_before(redis_client: Redis, at_ms: int) -> None:
    """Announce `w` as a worker of an earlier version, which sends no beats."""
    status = msgspec.msgpack.encode(replace(STATUS, at_ms=at_ms))
    key = Keys.of(redis_client).worker + "w"
    await redis_client.hset(key, mapping={"status": status, "metrics": "", "sla": '{"tiers":{}}', "incarnation": ""})
    await redis_client.pexpire(key, 6000)
    await redis_client.sadd(Keys.of(redis_client).workers, "w")


async def test_a_worker_of_an_earlier_version_is_seen_and_its_beats_are_those_of_its_status(
    redis_client: Redis,
) -> None:
    registry = RedisWorkerRegistry(redis_client)
    await registry.announce(replace(STATUS, worker_id="v", at_ms=1))
    for at_ms in (2, 3):
        await announce_as_before(redis_client, at_ms)
        assert await registry.beats() == {"v": Beat(1), "w": Beat(at_ms)}
    assert [status.worker_id for status in await registry.workers()] == ["v", "w"]
    assert await registry.sla() == {"v": "{}", "w": '{"tiers":{}}'}
    await redis_client.delete(Keys.of(redis_client).worker + "w")
    assert await registry.beats() == {"v": Beat(1)}


async def test_a_worker_that_goes_back_to_an_earlier_version_is_silent_once(redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)
    await registry.announce(replace(STATUS, at_ms=1))  # then it was killed
    await announce_as_before(redis_client, 2)
    assert await registry.beats() == {"w": Beat(1)}
    await registry.withdraw("w")  # as all do who see no new beat
    await announce_as_before(redis_client, 3)
    assert await registry.beats() == {"w": Beat(3)}


async def test_a_gateway_of_an_earlier_version_keeps_a_worker_of_which_it_reads_the_metrics(
    redis_client: Redis,
) -> None:
    """It reads a field of each worker, and forgets those that lack it, because they seem to have expired."""
    await RedisWorkerRegistry(redis_client).announce(STATUS, '{"tiers":{}}')
    fields = await redis_client.hmget(Keys.of(redis_client).worker + "w", ["status", "metrics", "sla"])
    assert await redis_client.smembers(Keys.of(redis_client).workers) == {b"w"} and fields[1] == b""
    assert isinstance(json.loads(fields[2]), dict), "a report, though one that says nothing"
    assert msgspec.msgpack.decode(fields[0], type=WorkerStatus) == STATUS
