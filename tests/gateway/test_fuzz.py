"""Requests that are nearly right never make the gateway fail, and leave nothing behind.

The examples are the same at each run. With TIDEGATE_FUZZ_EXAMPLES, there are as many as it says, new ones each time.
"""

import asyncio
import json
import os
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from redis.asyncio import Redis

from engine.interface import FinishReason
from gateway.requests.tokens.tokenizer import Tokenizer
from gateway.store_keys import GatewayKeys
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.store.keys import Keys
from tests.encoders import CONTEXT, pretrained
from tests.gateway.fuzzing import HEADERS, PARTS, bodies
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until

EXAMPLES = os.environ.get("TIDEGATE_FUZZ_EXAMPLES", "")
BOUNDED = settings(max_examples=int(EXAMPLES or 15), derandomize=not EXAMPLES)
BROKEN = (500, 502, 504)  # 503 is an honest answer: the tier's queue is full

KEYS, GATEWAY_KEYS = Keys(), GatewayKeys()
LASTING_KEYS = {KEYS.sequence, KEYS.epoch, KEYS.durable, KEYS.tiers, KEYS.followers}
LASTING_KEYS |= {GATEWAY_KEYS.storage, GATEWAY_KEYS.responses_sizes, GATEWAY_KEYS.responses_bytes}


def check_answer(response: httpx.Response) -> None:
    """Check that the answer has the form that OpenAI's or Anthropic's clients read, whatever was asked."""
    assert response.status_code not in BROKEN, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        is_anthropics = response.json().get("type") == "error"
        assert error["message"] and {"message", "type", *(() if is_anthropics else ("param", "code"))} == set(error)
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        for event in events:
            found = {} if event == "[DONE]" else json.loads(event)
            assert (found.get("error") or {}).get("type") not in ("server_error", "api_error"), event
    else:
        assert isinstance(response.json(), dict)


async def check_nothing_is_left(stand: Stand, redis: Redis) -> None:
    """Check that no request is open, nothing waits, and every key of the store will go by itself."""
    await until(lambda: stand.gateway.client.num_open == 0)
    assert not any((await stand.gateway.client.depths()).values())
    left = [key.decode() for key in await redis.keys("*") if await redis.ttl(key) == -1]
    assert {key for key in left if not key.startswith(GATEWAY_KEYS.responses_of)} <= LASTING_KEYS, left


def _stand(path: str, redis: Redis) -> AbstractAsyncContextManager[Stand]:
    """Return a stand whose model is of the kind that answers at `path`."""
    kind = {"/v1/embeddings": "embedding", "/v1/rerank": "rerank"}.get(path)
    if kind is None:
        return running_stand(redis=redis)
    return running_stand(_vector, redis=redis, kind=kind, tokenizer=Tokenizer(pretrained(), CONTEXT))


def _vector(request: Request) -> list[TokenEvent]:
    numbers = np.array([0.5, len(request.prompt_token_ids)], "<f4")
    return [TokenEvent(request.id, EventKind.FINISHED, 0, (0,), FinishReason.LENGTH, vector=numbers.tobytes())]


@pytest.mark.parametrize("path", PARTS)
async def test_a_body_with_faults_is_answered_or_refused(redis_client: Redis, path: str) -> None:
    async with _stand(path, redis_client) as stand:
        loop, threads = asyncio.get_running_loop(), threading.active_count()

        async def send(body: bytes, headers: dict[str, Any]) -> None:
            headers = {"content-type": "application/json"} | headers
            check_answer(await stand.http.post(path, content=body, headers=headers))

        @BOUNDED
        @given(bodies(path, MODEL), HEADERS)
        def examples(body: bytes, headers: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(send(body, headers), loop).result(30)

        await asyncio.to_thread(examples)
        await check_nothing_is_left(stand, redis_client)
        assert threading.active_count() <= threads + 8, "threads were left behind"
