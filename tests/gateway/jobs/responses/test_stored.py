"""Stored responses and conversations: real Valkey, real gateways, the official client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from gateway.identity import Keyring
from gateway.jobs.responses import history
from gateway.jobs.responses.store import ResponseStore
from gateway.store_keys import GatewayKeys
from tests.gateway.offline import ShiftedClock, keyring
from tests.gateway.stand import Bytes, Stand, running_stand
from tests.gateway.tiny_model import MODEL, text_of

TTL_S = 3600.0


@asynccontextmanager
async def storing(redis: Redis, max_bytes: int = 2**20, keys: Keyring | None = None) -> AsyncIterator[Stand]:
    settings = {"response_ttl_s": TTL_S, "store_mb": Bytes(16 * max_bytes)}
    async with running_stand("Hello there!", redis=redis, keyring=keys, **settings) as stand:
        yield stand


async def test_a_response_is_stored_with_its_input(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        created = await stand.client.responses.create(
            model=MODEL,
            input=[
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
            ],
        )
        found = await stand.client.responses.retrieve(created.id)
        pages = [page async for page in await stand.client.responses.input_items.list(created.id, limit=2, order="asc")]
        newest = await stand.client.responses.input_items.list(created.id)
    assert found == created
    assert [item.type for item in pages] == ["message"] * 3
    assert [item.content[0].text for item in pages] == ["one", "two", "three"]  # type: ignore[union-attr]
    assert [item.id for item in newest.data] == [item.id for item in reversed(pages)]


async def test_a_streamed_response_is_stored_before_its_end_is_reported(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        stream = await stand.client.responses.create(model=MODEL, input="hi", stream=True)
        async for event in stream:
            if event.type == "response.completed":
                found = await stand.client.responses.retrieve(event.response.id)
    assert found == event.response  # type: ignore[union-attr]


async def test_a_conversation_goes_on(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        first = await stand.client.responses.create(model=MODEL, input="one", instructions="be brief")
        second = await stand.client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        third = await stand.client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        prompt = text_of(stand.worker.served[-1].prompt_token_ids)
    assert third.previous_response_id == second.id
    hello = "<|im_start|>assistant\nHello there!<|im_end|>"
    turns = [f"<|im_start|>user\n{text}<|im_end|>" for text in ("one", "two", "three")]
    # The instructions are those of one response only, as in OpenAI's API.
    assert prompt == turns[0] + hello + turns[1] + hello + turns[2] + "<|im_start|>assistant\n"


async def test_an_item_may_be_given_by_its_id(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        first = await stand.client.responses.create(model=MODEL, input="one")
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        second = await stand.client.responses.create(
            model=MODEL,
            input=[{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}],
        )
        prompt = text_of(stand.worker.served[-1].prompt_token_ids)
        items = await stand.client.responses.input_items.list(second.id, order="asc")
        for missing in (f"msg_{'0' * 36}", ""):
            with pytest.raises(openai.NotFoundError):
                await stand.client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": missing}])
    assert "assistant\nHello there!<|im_end|><|im_start|>user\ntwo" in prompt
    assert items.data[1].id == first.output[0].id


async def test_the_responses_of_referred_items_are_bounded(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with storing(redis_client) as stand:
        created = [await stand.client.responses.create(model=MODEL, input="x" * 90) for _ in range(3)]
        references: Any = [{"type": "item_reference", "id": response.output[0].id} for response in created]
        await stand.client.responses.create(model=MODEL, input=references)
        monkeypatch.setattr(history, "MAX_BYTES", 700)
        await stand.client.responses.create(model=MODEL, input=references[:1])
        with pytest.raises(openai.BadRequestError) as caught:
            await stand.client.responses.create(model=MODEL, input=references)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


async def test_a_deleted_response_is_gone_also_for_its_conversation(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        created = await stand.client.responses.create(model=MODEL, input="one")
        await stand.client.responses.delete(created.id)
        for call in (
            stand.client.responses.retrieve(created.id),
            stand.client.responses.delete(created.id),
            stand.client.responses.input_items.list(created.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError) as caught:
            await stand.client.responses.create(model=MODEL, input="two", previous_response_id=created.id)
    assert caught.value.code == "previous_response_not_found"
    assert await redis_client.hgetall(GatewayKeys.of(redis_client).responses_bytes) == {}  # type: ignore[misc]


async def test_without_store_nothing_is_kept(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        created = await stand.client.responses.create(model=MODEL, input="one", store=False)
        with pytest.raises(openai.NotFoundError):
            await stand.client.responses.retrieve(created.id)
    assert await redis_client.keys(f"{GatewayKeys.of(redis_client).prefix}response*") == []


async def test_another_key_does_not_see_a_response(redis_client: Redis) -> None:
    async with storing(redis_client, keys=keyring(ann=None, bob=None)) as stand:
        ann, bob = (stand.client.with_options(api_key=f"sk-{name}") for name in ("ann", "bob"))
        created = await ann.responses.create(model=MODEL, input="one")
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(created.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.delete(created.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.create(
                model=MODEL, input=[{"type": "item_reference", "id": created.output[0].id or ""}]
            )
        with pytest.raises(openai.BadRequestError):
            await bob.responses.create(model=MODEL, input="two", previous_response_id=created.id)
        assert (await ann.responses.retrieve(created.id)).id == created.id


async def test_a_response_without_room_is_answered_and_says_that_it_is_not_stored(redis_client: Redis) -> None:
    async with storing(redis_client, max_bytes=100) as stand:
        created = await stand.client.responses.create(model=MODEL, input="one")
        assert (created.status, created.model_dump()["store"]) == ("completed", False)
        streamed = await stand.client.responses.create(model=MODEL, input="one", stream=True)
        last = [event async for event in streamed][-1]
        assert last.type == "response.completed" and last.response.model_dump()["store"] is False
        with pytest.raises(openai.InternalServerError) as caught:
            await stand.client.responses.create(model=MODEL, input="one", background=True)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    assert await redis_client.hgetall(GatewayKeys.of(redis_client).responses_bytes) == {}  # type: ignore[misc]


def response(number: int, previous: str | None = None, status: str = "completed") -> dict[str, Any]:
    return {"id": f"resp_{number:032x}", "status": status, "output": [], "previous_response_id": previous}


async def kept(store: ResponseStore, numbers: range, owner: str | None) -> list[bool]:
    return [await store.get(response(n)["id"], owner) is not None for n in numbers]


async def test_the_owner_that_has_the_most_makes_room(redis_client: Redis) -> None:
    store = ResponseStore(redis_client, ShiftedClock(), TTL_S, max_bytes=6000)
    for n in range(2):
        await store.create(response(n), [{"text": "x" * 600}], "ann")
    for n in range(2, 20):
        await store.create(response(n), [{"text": "x" * 600}], "bob")
    assert await kept(store, range(2), "ann") == [True, True]
    of_bob = await kept(store, range(2, 20), "bob")
    assert of_bob == sorted(of_bob) and 3 < sum(of_bob) < 8
    for n in range(20, 30):
        await store.create(response(n), [{"text": "x" * 600}], "ann")
    sizes = await redis_client.hgetall(GatewayKeys.of(redis_client).responses_bytes)  # type: ignore[misc]
    held = {owner: int(size) for owner, size in sizes.items()}
    assert sum(held.values()) <= 6000 and abs(held[b"ann"] - held[b"bob"]) < 1500, "both have given"


async def test_what_is_being_generated_stays(redis_client: Redis) -> None:
    clock = ShiftedClock()
    store = ResponseStore(redis_client, clock, TTL_S, max_bytes=3000)
    lease_ms = clock.wall_ms() + 10_000
    await store.create(response(0, status="queued"), [{"text": "x" * 600}], "ann", lease_ms)
    for n in range(1, 10):
        await store.create(response(n), [{"text": "x" * 600}], "ann")
    assert (await kept(store, range(10), "ann"))[0] and sum(await kept(store, range(10), "ann")) < 5
    assert await store.update(response(0, status="in_progress"))
    clock.shift_s += 11  # its gateway has died
    for n in range(10, 20):
        await store.create(response(n), [{"text": "x" * 600}], "ann")
    assert await kept(store, range(1), "ann") == [False]


async def test_a_conversation_in_use_does_not_lose_its_beginning(redis_client: Redis) -> None:
    clock = ShiftedClock()
    store = ResponseStore(redis_client, clock, TTL_S, 2**20)
    first, other, last = response(1), response(2), response(3, response(1)["id"])
    for stored in (first, other):
        await store.create(stored, [{"id": stored["id"]}], None)
    clock.shift_s += 3000
    await store.create(last, [], None)
    assert await store.conversation(last["id"], None, 1000) == [{"id": first["id"]}]
    clock.shift_s += 1000  # later than the expiry of the first two, if the conversation had not been read
    await store.create(response(4), [], None)
    assert await store.get(first["id"], None) is not None
    assert await store.get(other["id"], None) is None
    assert await redis_client.hlen(GatewayKeys.of(redis_client).responses_sizes) == 3  # type: ignore[misc]
