"""The exact answer cache: what decides its key, what is replayed, and how long and how much it keeps."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec import structs
from pydantic import BaseModel
from redis.asyncio import Redis

from engine.interface import FinishReason, SamplingParams
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
from gateway.requests.generate.answer_cache import AnswerCache
from gateway.requests.tokens.model_files import model_revision
from gateway.store_keys import GatewayKeys
from scheduler.request import Delivery, EventKind, Request, TokenEvent
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, token_ids
from tests.scheduler.queue.harness import ManualClock, make_request

CACHE = {"X-Tidegate-Cache": "60"}
HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "temperature": 0}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# For each field of the bodies, a change and whether it changes the output ("miss": it is part of the key; "bypass": the
# answer cannot be cached) or only how the answer is shown, or nothing at all ("hit").
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "alias"}, "hit"),
    "messages": ({"messages": [{"role": "user", "content": "ho"}]}, "miss"),
    "prompt": ({"prompt": "ho"}, "miss"),
    "max_tokens": ({"max_tokens": 5}, "miss"),
    "max_completion_tokens": ({"max_completion_tokens": 5}, "miss"),
    "temperature": ({"temperature": 0.5}, "bypass"),
    "top_p": ({"top_p": 0.5}, "miss"),
    "top_k": ({"top_k": 3}, "miss"),
    "n": ({"n": 2}, "bypass"),
    "best_of": ({"best_of": 1}, "hit"),
    "seed": ({"seed": 3}, "hit"),  # a greedy answer does not depend on it; there is a test with a temperature
    "stop": ({"stop": "there"}, "miss"),
    "stream": ({"stream": True}, "hit"),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, "hit"),
    "ignore_eos": ({"ignore_eos": True}, "miss"),
    "service_tier": ({"service_tier": "flex"}, "hit"),
    "deadline_ms": ({"deadline_ms": 5_000, "service_tier": "flex"}, "hit"),
    "user": ({"user": "u"}, "hit"),
    "cache_salt": ({"cache_salt": "s"}, "miss"),
    "metadata": ({"metadata": {"a": "b"}}, "hit"),
    "reasoning_effort": ({"reasoning_effort": "low"}, "hit"),  # no model of this server knows it
    "verbosity": ({"verbosity": "low"}, "hit"),
    "safety_identifier": ({"safety_identifier": "s"}, "hit"),
    "prompt_cache_key": ({"prompt_cache_key": "k"}, "hit"),
    "prompt_cache_retention": ({"prompt_cache_retention": "24h"}, "hit"),
    "store": ({"store": True}, "hit"),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, "hit"),
    "presence_penalty": ({"presence_penalty": 1}, "miss"),
    "frequency_penalty": ({"frequency_penalty": 1}, "miss"),
    "repetition_penalty": ({"repetition_penalty": 2}, "miss"),
    "logit_bias": ({"logit_bias": {"5": 1}}, "miss"),
    "min_p": ({"min_p": 0.5}, "miss"),
    "allowed_token_ids": ({"allowed_token_ids": [7, 8]}, "miss"),
    "bad_words": ({"bad_words": ["tide"]}, "miss"),
    "min_tokens": ({"min_tokens": 3}, "miss"),
    "stop_token_ids": ({"stop_token_ids": [7]}, "miss"),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, "miss"),
    "add_special_tokens": ({"add_special_tokens": True}, "hit"),  # the test's tokenizer adds none
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 1}, "miss"),
    "truncation_side": ({"truncation_side": "left"}, "hit"),  # only together with truncate_prompt_tokens
    "prompt_logprobs": ({"prompt_logprobs": 1}, "miss"),
    "ChatCompletionRequest.logprobs": ({"logprobs": True}, "miss"),
    "CompletionRequest.logprobs": ({"logprobs": 1}, "miss"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, "miss"),
    "return_tokens_as_token_ids": ({"return_tokens_as_token_ids": True}, "hit"),
    "return_token_ids": ({"return_token_ids": True}, "miss"),
    "ChatCompletionRequest.echo": ({"echo": True}, "hit"),  # only how it is shown
    "CompletionRequest.echo": ({"echo": True}, "miss"),
    "skip_special_tokens": ({"skip_special_tokens": False}, "miss"),
    "spaces_between_special_tokens": ({"spaces_between_special_tokens": True}, "hit"),
    "detokenize": ({"detokenize": False}, "miss"),
    "request_id": ({"request_id": "mine"}, "hit"),
    "priority": ({"priority": 3}, "hit"),
    "response_format": ({"response_format": {"type": "json_object"}}, "miss"),
    "structured_outputs": ({"structured_outputs": {"regex": "a+"}}, "miss"),
    "guided_json": ({"guided_json": {"type": "object"}}, "miss"),
    "guided_regex": ({"guided_regex": "a+"}, "miss"),
    "guided_choice": ({"guided_choice": ["a", "b"]}, "miss"),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, "miss"),
    "guided_whitespace_pattern": ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": "x"}, "miss"),
    "json_schema": ({"json_schema": {"type": "object"}}, "miss"),
    "regex": ({"regex": "a+"}, "miss"),
    "ebnf": ({"ebnf": 'root ::= "a"'}, "miss"),
    "grammar": ({"grammar": 'start: "a"'}, "miss"),
    "add_generation_prompt": ({"add_generation_prompt": False}, "miss"),
    "continue_final_message": ({"continue_final_message": True, "add_generation_prompt": False}, "miss"),
    "chat_template": ({"chat_template": "{{ messages[0].content }}"}, "miss"),
    "chat_template_kwargs": ({"chat_template_kwargs": {"a": 1}}, "hit"),  # the test's template does not use it
    "documents": ({}, "hit"),  # the test's template takes none
    "tools": ({"tools": [TOOL]}, "hit"),  # the test's template does not show them
    "tool_choice": ({"tools": [TOOL], "tool_choice": "required"}, "miss"),
    "functions": ({"functions": [TOOL["function"]]}, "miss"),
    "function_call": ({"functions": [TOOL["function"]], "function_call": {"name": "f"}}, "miss"),
    "include_reasoning": ({"include_reasoning": False}, "miss"),
}
# Fields of a scheduler request that do not change its output.
NEUTRAL = {"id", "tier", "arrival_ms", "deadline_ms", "reply_to", "delivery", "is_whole", "wants_receipt", "is_seeded"}


@pytest.fixture
async def stand(redis_client: Redis) -> AsyncIterator[Stand]:
    async with running_stand(redis=redis_client, trust_request_chat_template=True) as running:
        yield running


async def ask(stand: Stand, body: dict[str, Any], headers: dict[str, str] = CACHE) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await stand.post(path, body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def result_of(answer: httpx.Response) -> str | None:
    result: str | None = answer.headers.get("x-tidegate-cache")
    return result


def shown(answer: httpx.Response) -> Any:
    """Return what an answer says, streamed or not, without its id and time. Its usage has other cached tokens."""
    if not answer.text.startswith("data: "):
        return _without_identity(answer.json())
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [_without_identity(json.loads(line)) for line in lines if line != "[DONE]"]
    text = "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for x in chunks for c in x["choices"])
    return text, chunks[0] | {"choices": None}, chunks[-1], lines[-1]


def _without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in answer.items() if name not in ("id", "created")}
    for_all = {"prompt_tokens_details": None}
    return kept | {"usage": {**kept["usage"], **for_all}} if kept.get("usage") else kept


@pytest.mark.parametrize(("kind", "base"), [(ChatCompletionRequest, CHAT), (CompletionRequest, TEXT)])
async def test_every_field_that_changes_the_output_changes_the_key(
    stand: Stand, redis_client: Redis, kind: type[BaseModel], base: dict[str, Any]
) -> None:
    for name in kind.model_fields:
        found = FIELDS.get(f"{kind.__name__}.{name}", FIELDS.get(name))
        assert found is not None, f"does {name!r} change the output? Say so in FIELDS"
        change, expected = found
        await redis_client.flushall()
        assert [result_of(await ask(stand, base)) for _ in range(2)] == ["miss", "hit"]
        answer = await ask(stand, base | change)
        assert (name, result_of(answer)) == (name, expected)
        assert shown(answer) == shown(await ask(stand, base | change, {})), name


async def test_the_seed_is_part_of_the_key_of_a_sampled_answer(stand: Stand) -> None:
    sampled = CHAT | {"temperature": 1}
    seeds = [(None, "bypass"), (3, "miss"), (3, "hit"), (4, "miss")]
    assert [result_of(await ask(stand, sampled | {"seed": seed})) for seed, _ in seeds] == [r for _, r in seeds]


def cache_on(redis: Redis, model: str = "m", **limits: int) -> AnswerCache:
    sizes = {"max_ttl_s": 100, "max_bytes": 10_000} | limits
    return AnswerCache(redis, ManualClock(), model, **sizes)


def changed(value: Any) -> Any:
    """Return another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case tuple():
            return (*value, (1, 2.0) if not value else value[-1])
        case None:
            return 1
        case Delivery():
            return Delivery.AT_END
    raise AssertionError(f"how does {value!r} change?")


def test_every_field_of_a_scheduler_request_is_in_the_key_or_known_to_be_neutral(redis_client: Redis) -> None:
    request, cache = make_request(), cache_on(redis_client)
    neutral = set()
    for name in Request.__struct_fields__:
        value = getattr(request, name)
        value = structs.replace(value, top_k=9) if name == "sampling" else changed(value)
        other = structs.replace(request, **{name: value})
        neutral |= {name} if cache._hash(request, ()) == cache._hash(other, ()) else set()
    assert neutral == NEUTRAL
    for name in SamplingParams.__struct_fields__:
        sampling = structs.replace(request.sampling, **{name: changed(getattr(request.sampling, name))})
        assert cache._hash(request, ()) != cache._hash(structs.replace(request, sampling=sampling), ()), name


async def test_a_hit_costs_no_engine_time_and_has_its_own_id(stand: Stand) -> None:
    first, second = [await ask(stand, CHAT) for _ in range(2)]
    assert len(stand.worker.served) == 1
    assert first.json()["id"] != second.json()["id"]
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert stand.metric("tidegate_answer_cache_total", result="hit") == 1


async def test_an_output_cut_by_a_stop_string_is_replayed_as_it_was(stand: Stand) -> None:
    stopped = CHAT | {"stop": "the"}
    first, second = [await ask(stand, stopped) for _ in range(2)]
    assert [result_of(first), result_of(second)] == ["miss", "hit"]
    [choice] = second.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello ", "stop")
    assert shown(first) == shown(second)


async def test_a_failed_output_is_not_kept(redis_client: Redis) -> None:
    def fail(request: Request) -> list[TokenEvent]:
        ids = token_ids("He")
        return [
            TokenEvent(request.id, EventKind.TOKENS, 0, ids),
            TokenEvent(request.id, EventKind.FAILED, len(ids), error="NaN"),
        ]

    async with running_stand(fail, redis=redis_client) as stand:
        assert (await stand.post("/v1/chat/completions", CHAT, headers=CACHE)).status_code == 500
        stand.worker.script = answer_with("Hello!")
        assert result_of(await ask(stand, CHAT)) == "miss"


async def test_an_answer_expires_after_its_ttl_which_has_a_maximum(redis_client: Redis) -> None:
    cache = cache_on(redis_client)
    for ttl_s, longest_s in ((60, 60), (10**9, 100)):
        lookup = await cache.look_up([make_request(tokens=ttl_s % 100 + 1)], (), True, ttl_s)
        await cache.store(lookup, [TokenEvent("r1", EventKind.FINISHED, 0, (1,), FinishReason.STOP)])
        assert longest_s - 30 < await redis_client.pttl(lookup.key) / 1000 <= longest_s


async def keep(cache: AnswerCache, number: int, ttl_s: int, num_tokens: int = 100) -> str:
    lookup = await cache.look_up([make_request(tokens=number)], (), True, ttl_s)
    await cache.store(lookup, [TokenEvent("r1", EventKind.FINISHED, 0, (7,) * num_tokens, FinishReason.STOP)])
    return lookup.key


async def test_a_full_cache_drops_what_expires_first(redis_client: Redis) -> None:
    cache = cache_on(redis_client, max_bytes=500)
    keys = [await keep(cache, number, ttl_s) for number, ttl_s in ((1, 50), (2, 10), (3, 90), (4, 80))]
    sizes = [await redis_client.strlen(key) for key in keys]
    kept = [key for key, size in zip(keys, sizes, strict=True) if size]
    assert keys[1] not in kept and keys[3] in kept
    assert await redis_client.hget(GatewayKeys.of(redis_client).cache_sizes, "total") == str(sum(sizes)).encode()
    assert sum(sizes) <= 500
    assert await redis_client.zcard(GatewayKeys.of(redis_client).cache_index) == len(kept)
    await keep(cache, 5, 99, num_tokens=2000)
    assert [await redis_client.strlen(key) for key in keys] == sizes, "an output larger than the cache changes nothing"


async def test_the_size_stays_right_when_answers_are_replaced_or_expire(redis_client: Redis) -> None:
    cache = cache_on(redis_client)
    key = await keep(cache, 1, 50)
    lookup = replace(await cache.look_up([make_request(tokens=2)], (), True, 50), key=key)
    await cache.store(lookup, [TokenEvent("r1", EventKind.FINISHED, 0, (7, 8), FinishReason.STOP)])
    gone = await keep(cache, 3, 50)
    await redis_client.delete(gone)
    assert isinstance(cache._clock, ManualClock)
    cache._clock.advance(51)
    last = await keep(cache, 4, 50)
    total = await redis_client.hget(GatewayKeys.of(redis_client).cache_sizes, "total")
    assert total == str(await redis_client.strlen(last)).encode()


async def test_the_index_and_the_sizes_expire_with_the_last_answer(redis_client: Redis) -> None:
    cache, keys = cache_on(redis_client), GatewayKeys.of(redis_client)
    for number, ttl_s, longest_s in ((1, 50, 50), (2, 90, 90), (3, 10, 90)):
        await keep(cache, number, ttl_s)
        for key in (keys.cache_index, keys.cache_sizes):
            assert longest_s - 30 < await redis_client.pttl(key) / 1000 <= longest_s


def test_a_models_revision_changes_with_its_files(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"0" * 2**20 + b"1")
    revisions = [model_revision(str(tmp_path)), model_revision(str(tmp_path))]
    weights.write_bytes(b"0" * 2**20 + b"22")
    revisions.append(model_revision(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"a": 1}')
    revisions.append(model_revision(str(tmp_path)))
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 3
    assert model_revision("nobody/has-this-model") == ""
