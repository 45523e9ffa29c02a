"""`--store-replicas`: what is acknowledged is at the replicas, and nothing is left of what is refused."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from redis.asyncio import Redis

from scheduler.store import connection, durability
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL
from tests.scheduler.store.nodes import Pair, server_pair

pytestmark = pytest.mark.timeout(60)
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"tiny","messages":[]}}'


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    with server_pair(tmp_path) as pair:
        await pair.start()
        yield pair


async def upload(stand: Stand) -> str:
    return (await stand.client.files.create(file=("in.jsonl", LINE), purpose="batch")).id


async def records(redis: Redis) -> set[bytes]:
    kinds = ("file", "batch", "response")
    return {key for kind in kinds for key in await redis.keys(f"tidegate:{kind}:*") if b":events:" not in key}


async def test_files_batches_and_background_responses_wait_for_the_replica(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "REPLICAS_S", 0.1)
    async with (
        connection.connect(pair.url) as redis,
        running_stand(redis=redis, data_dir=tmp_path, store_replicas=1) as stand,
    ):

        async def create_response() -> str:
            return (await stand.client.responses.create(model=MODEL, input="hi", background=True)).id

        async def create_batch() -> str:
            created = await stand.client.batches.create(
                input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            return created.id

        file_id, response_id = await upload(stand), await create_response()
        for key in (f"tidegate:file:{file_id}", f"tidegate:response:{response_id}"):
            assert pair.replica.ask("EXISTS", key) == 1
        kept = await records(redis)
        pair.replica.send(signal.SIGSTOP)
        for create in (create_batch, create_response, lambda: upload(stand)):
            with pytest.raises(openai.APIStatusError, match=durability.TOO_FEW_REPLICAS) as refused:
                await create()
            assert refused.value.status_code == 503
        assert await records(redis) == kept, "nothing is left of what was refused"
        chat = await stand.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert chat.choices[0].message.content
        pair.replica.send(signal.SIGCONT)
        await pair.replica.has_all_of(pair.primary)
        batch_id = await create_batch()
        assert pair.replica.ask("EXISTS", f"tidegate:batch:{batch_id}") == 1
