"""/v1/conversations, and responses in a conversation: the official client, a real store."""

import asyncio
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from gateway.jobs.responses import conversations, history
from gateway.protocol.bodies.unsupported import IGNORED_HEADER
from tests.gateway.jobs.responses.test_stored import storing
from tests.gateway.offline import keyring
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL, text_of

HI: Any = {"role": "user", "content": "hi"}


def said(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items]


async def test_a_conversation_is_kept_changed_and_deleted(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        api = stand.client.conversations
        made = await api.create(items=[HI], metadata={"a": "b"})
        assert made.id.startswith("conv_") and made.metadata == {"a": "b"}
        assert await api.retrieve(made.id) == made
        assert (await api.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
        assert said((await api.items.list(made.id)).data) == ["hi"], "the items stay"
        gone = await api.delete(made.id)
        assert gone.deleted and gone.object == "conversation.deleted"
        with pytest.raises(openai.NotFoundError, match="Conversation with id"):
            await api.retrieve(made.id)


async def test_items_of_hosted_tools_are_left_out_and_named(redis_client: Redis) -> None:
    searched: Any = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    async with storing(redis_client) as stand:
        api = stand.client.conversations.with_raw_response
        created = await api.create(items=[HI, searched])
        made = created.parse()
        added = await stand.client.conversations.items.with_raw_response.create(made.id, items=[searched, HI, searched])
        page = await stand.client.conversations.items.list(made.id)
    assert [answer.headers[IGNORED_HEADER] for answer in (created, added)] == ["items.web_search_call"] * 2
    assert said(page.data) == ["hi", "hi"]


async def test_the_items_of_a_conversation(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        api = stand.client.conversations
        made = await api.create()
        call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
        added = await api.items.create(made.id, items=[HI, call, {"role": "assistant", "content": "yes"}])
        pages = [item async for item in await api.items.list(made.id, limit=2, order="asc")]
        first: Any = await api.items.retrieve(added.data[0].id, conversation_id=made.id)
        left = await api.items.delete(added.data[1].id, conversation_id=made.id)
        now = await api.items.list(made.id)
        for lost in (
            api.items.retrieve(added.data[1].id, conversation_id=made.id),
            api.items.delete(added.data[1].id, conversation_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="Item with id"):
                await lost
        with pytest.raises(openai.BadRequestError, match="at most 20"):
            await api.items.create(made.id, items=[HI] * 21)
    assert [item.id for item in pages] == [item.id for item in added.data]
    assert [item.type for item in pages] == ["message", "function_call", "message"]
    assert first.content[0].text == "hi"
    assert left == made
    assert said(now.data) == ["yes", "hi"], "the newest first"


async def test_responses_read_their_conversation_and_add_to_it(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        made = await stand.client.conversations.create(items=[{"role": "user", "content": "one"}])
        second: Any = await stand.client.responses.create(model=MODEL, input="two", conversation=made.id)
        stream = await stand.client.responses.create(
            model=MODEL, input="three", conversation={"id": made.id}, store=False, stream=True
        )
        async for _ in stream:
            pass
        prompt = text_of(stand.worker.served[-1].prompt_token_ids)
        items = (await stand.client.conversations.items.list(made.id, order="asc")).data
    assert second.conversation.id == made.id
    hello = "<|im_start|>assistant\nHello there!<|im_end|>"
    one, two, three = (f"<|im_start|>user\n{text}<|im_end|>" for text in ("one", "two", "three"))
    assert prompt == one + two + hello + three + "<|im_start|>assistant\n"
    assert said(items) == ["one", "two", "Hello there!", "three", "Hello there!"]


async def test_a_background_response_adds_to_its_conversation(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        made = await stand.client.conversations.create()
        queued = await stand.client.responses.create(model=MODEL, input="hi", conversation=made.id, background=True)
        while (await stand.client.responses.retrieve(queued.id)).status != "completed":
            await asyncio.sleep(0)
        items: list[Any] = []
        while len(items) < 2:
            items = (await stand.client.conversations.items.list(made.id, order="asc")).data
    assert said(items) == ["hi", "Hello there!"]


async def test_a_failed_response_adds_nothing(redis_client: Redis) -> None:
    async with running_stand(answer_with(""), redis=redis_client) as stand:
        made = await stand.client.conversations.create()
        stand.worker.gate.clear()
        task = asyncio.create_task(stand.client.responses.create(model=MODEL, input="hi", conversation=made.id))
        while not stand.worker.served:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await stand.client.conversations.items.list(made.id)).data == []


async def test_changes_at_the_same_time_are_all_kept(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        made = await stand.client.conversations.create()
        await asyncio.gather(
            *(stand.client.conversations.items.create(made.id, items=[HI]) for _ in range(8)),
            stand.client.conversations.update(made.id, metadata={"a": "b"}),
        )
        items = (await stand.client.conversations.items.list(made.id)).data
        metadata = (await stand.client.conversations.retrieve(made.id)).metadata
    assert len({item.id for item in items}) == 8
    assert metadata == {"a": "b"}


async def test_a_conversation_is_its_owners(redis_client: Redis) -> None:
    async with storing(redis_client, keys=keyring(alice=None, bob=None)) as stand:
        alice, bob = (stand.client.with_options(api_key=f"sk-{name}") for name in ("alice", "bob"))
        made = await alice.conversations.create(items=[HI])
        item = (await alice.conversations.items.list(made.id)).data[0]
        for attempt in (
            bob.conversations.retrieve(made.id),
            bob.conversations.update(made.id, metadata={}),
            bob.conversations.items.list(made.id),
            bob.conversations.items.create(made.id, items=[HI]),
            bob.conversations.items.delete(item.id, conversation_id=made.id),
            bob.conversations.delete(made.id),
            bob.responses.create(model=MODEL, input="hi", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="Conversation with id"):
                await attempt
        assert said((await alice.conversations.items.list(made.id)).data) == ["hi"]  # type: ignore[arg-type]


async def test_conversations_are_no_responses(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        made = await stand.client.conversations.create(items=[HI])
        response = await stand.client.responses.create(model=MODEL, input="hi")
        for missing in (
            stand.client.responses.retrieve(made.id),
            stand.client.responses.delete(made.id),
            stand.client.conversations.retrieve(response.id),
            stand.client.conversations.delete(response.id),
            stand.client.responses.create(model=MODEL, input="hi", conversation=response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await missing
        with pytest.raises(openai.BadRequestError, match="Previous response"):
            await stand.client.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match="not both"):
            await stand.client.responses.create(
                model=MODEL, input="hi", conversation=made.id, previous_response_id=response.id
            )


async def test_a_conversation_has_a_greatest_size(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_BYTES", 500)
    monkeypatch.setattr(history, "MAX_BYTES", 500)
    async with storing(redis_client) as stand:
        made = await stand.client.conversations.create(items=[HI])
        with pytest.raises(openai.BadRequestError, match="larger than 500 bytes"):
            await stand.client.conversations.items.create(made.id, items=[{"role": "user", "content": "x" * 500}])
        response = await stand.client.responses.create(model=MODEL, input="y" * 200, conversation=made.id)
        items = (await stand.client.conversations.items.list(made.id)).data
    assert response.output_text == "Hello there!", "it was generated, so the client gets it"
    assert said(items) == ["hi"]  # type: ignore[arg-type]


async def test_without_a_store_there_are_no_conversations() -> None:
    async with running_stand(response_ttl_s=0) as stand:
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            await stand.client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            await stand.client.responses.create(model=MODEL, input="hi", conversation="conv_1")
