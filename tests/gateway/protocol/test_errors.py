"""Every kind of OpenAI's errors, as a client receives it."""

import asyncio
from typing import Any

import pytest
import redis.exceptions
import structlog

from gateway.protocol.errors import rejected
from scheduler.client.rejection import Rejected, RejectReason
from tests.gateway.stand import Bytes, Stand, make_tiers, running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL
from tests.waiting import until

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HI}
MISSING = "missing_required_parameter"
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"].startswith("req_")
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    return error


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INVALID_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [*HI, 5]}, "messages[1]", "invalid_type"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [*HI, {"role": "tool", "tool_call_id": "a"}]}, "messages[1].content", "missing_required_parameter"),
    (
        {"messages": [*HI, {"role": "tool", "content": "a"}]},
        "messages[1].tool_call_id",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]", "invalid_type"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls", "invalid_value"),
    ({"messages": HI * 300}, "messages", "context_length_exceeded"),
    ({"verbosity": "loud"}, "verbosity", "invalid_value"),
    ({"prompt_cache_retention": "1h"}, "prompt_cache_retention", "invalid_value"),
    (
        {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[1].content[1].image_url",
        MISSING,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]},
        "messages[0].content[0]",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", MISSING),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": 10**400}, "temperature", "invalid_type"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"deadline_ms": 0}, "deadline_ms", "invalid_value"),
    ({"service_tier": "platinum"}, "service_tier", "invalid_value"),
    ({"metadata": {"a": 5}}, "metadata.a", "invalid_type"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "context_length_exceeded"),
    ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": CONTEXT, "max_tokens": 1}, "max_completion_tokens", "context_length_exceeded"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": 2}, "logprobs", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
    ({"presence_penalty": -2.1}, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty", "invalid_value"),  # logits ÷ it are infinite
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [999_999]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [5], "min_tokens": 1}, "allowed_token_ids", "invalid_value"),
    ({"bad_words": [""]}, "bad_words[0]", "invalid_value"),
    ({"bad_words": ["a"] * 129}, "bad_words", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    ({"stop_token_ids": [999_999]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"detokenize": False, "stop": "a"}, "detokenize", "invalid_value"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "invalid_value",
    ),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"request_id": "a b"}, "request_id", "invalid_value"),
    ({"priority": 2**63}, "priority", "invalid_value"),
    ({"temprature": 0}, "temprature", "unknown_parameter"),
]
UNSUPPORTED: list[dict[str, Any]] = [
    {"thinking_token_budget": 5},
    {"vllm_xargs": {"a": 1}},
    {"logprob_token_ids": [1]},
    {"use_beam_search": True},
    {"repetition_detection": {}},
    {"suffix": "x"},
    {"audio": {}},
    {"modalities": ["text", "audio"]},
    {"prediction": {"type": "content"}},
    {"structural_tag": "x"},
    {"logits_processors": ["a.b"]},
]
INVALID_TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [""]}, "prompt[0]", "invalid_value"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [[1], []]}, "prompt[1]", "invalid_value"),
    ({"prompt": [1, 10**6]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 100, "n": 100}, "n", "invalid_value"),
    ({"prompt": ["a"] * 33, "n": 2}, "n", "invalid_value"),  # the tier's queue holds 64
    ({"prompt": [1] * CONTEXT}, "prompt", "context_length_exceeded"),
    ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
]


async def test_invalid_bodies_name_the_parameter() -> None:
    rows = [("/v1/chat/completions", CHAT, *row) for row in INVALID_CHATS]
    rows += [("/v1/completions", TEXT, *row) for row in INVALID_TEXTS]
    async with running_stand() as stand:
        for path, body, change, param, code in rows:
            error = error_of(await stand.post(path, {**body, **change}), 400)
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), change
        assert stand.worker.served == []


async def test_unsupported_parameters_are_refused_by_name() -> None:
    async with running_stand() as stand:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for change in UNSUPPORTED:
                error = error_of(await stand.post(path, {**body, **change}), 400)
                assert (error["code"], error["param"]) == ("unsupported_parameter", *change), change


async def test_parameters_of_chats_are_refused_by_name_in_completions() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    changes: list[dict[str, Any]] = [{"tools": [tool]}, {"top_logprobs": 2}, {"max_completion_tokens": 5}]
    async with running_stand() as stand:
        for change in changes:
            error = error_of(await stand.post("/v1/completions", {**TEXT, **change}), 400)
            assert (error["code"], error["param"]) == ("unsupported_parameter", *change), change
        unset = {name: None for change in changes for name in change}
        assert (await stand.post("/v1/completions", {**TEXT, **unset})).status_code == 200


async def test_default_values_of_unsupported_parameters_are_accepted() -> None:
    usual: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "modalities": ["text"],
        "repetition_penalty": 1.0,
        "n": 2,
        "best_of": 2,
        "reasoning_effort": "low",
        "verbosity": "high",
        "safety_identifier": "x" * 64,
        "prompt_cache_key": "a",
        "store": True,
        "logits_processors": [],
        "return_token_ids": False,
        "spaces_between_special_tokens": True,
        "top_k": -1,
        "seed": None,
        "stop": None,
        "unheard_of": [1],
    }
    async with running_stand() as stand:
        assert (await stand.post("/v1/chat/completions", {**CHAT, **usual})).status_code == 200


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"model": "\xed\xa0\x80"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "invalid_value"),
        (b"[]", "invalid_type"),
        (b"5", "invalid_type"),
        (b"{}", "missing_required_parameter"),
    ],
)
async def test_bodies_that_are_not_a_json_object(content: bytes, code: str) -> None:
    async with running_stand() as stand:
        response = await stand.http.post("/v1/chat/completions", content=content)
    assert error_of(response, 400)["code"] == code


async def test_unknown_routes_and_methods() -> None:
    async with running_stand() as stand:
        assert error_of(await stand.http.get("/v1/nothing"), 404)["type"] == "invalid_request_error"
        wrong = await stand.http.get("/v1/chat/completions")
        assert error_of(wrong, 405)["code"] == "method_not_supported"
        assert wrong.headers["allow"] == "POST"
        assert (await stand.http.put("/v1/files")).headers["allow"] == "GET, POST"
        assert (await stand.http.put("/v1/files/x")).headers["allow"] == "DELETE, GET"
        assert (await stand.http.put("/v1/batches/estimate")).headers["allow"] == "POST"


async def test_bodies_over_the_limit(stand_bytes: int = 1000) -> None:
    big = {**CHAT, "user": "x" * stand_bytes}

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with running_stand(max_body_mb=Bytes(stand_bytes)) as stand:
        assert error_of(await stand.post("/v1/chat/completions", big), 413)["type"] == "invalid_request_error"
        chunked = await stand.http.post("/v1/chat/completions", content=pieces())
        assert error_of(chunked, 413)["type"] == "invalid_request_error"
        assert (await stand.post("/v1/chat/completions", CHAT)).status_code == 200


async def fill(stand: Stand, service_tier: str) -> Any:
    """Return the answer to the second of two requests to a tier whose queue holds one."""
    stand.worker.claims = False
    body = {**CHAT, "service_tier": service_tier}
    first = asyncio.create_task(stand.post("/v1/chat/completions", body))
    await until(lambda: stand.waiting == 1)
    second = await stand.post("/v1/chat/completions", body)
    first.cancel()
    return second


@pytest.mark.parametrize(
    ("service_tier", "tier", "expected", "room_in_s"),
    [
        ("default", "realtime", (503, "server_error", "server_overloaded"), 10),
        ("flex", "bulk", (429, "resource_unavailable", "resource_unavailable"), 20),
    ],
)
async def test_a_full_queue(service_tier: str, tier: str, expected: tuple[int, str, str], room_in_s: int) -> None:
    tiers = make_tiers(realtime={"queue_limit": 1}, bulk={"queue_limit": 1})
    async with running_stand(tiers=tiers) as stand:
        response = await fill(stand, service_tier)
        refused = stand.metric("tidegate_requests_rejected_total", tier=tier, reason="queue_full")
    error = error_of(response, expected[0])
    assert (error["type"], error["code"]) == expected[1:]
    # The worker finishes FINISHED_PER_S requests of the tier: one leaves the queue in so many seconds.
    assert response.headers["retry-after"] == str(room_in_s)
    assert response.headers["retry-after-ms"] == str(1000 * room_in_s)
    assert refused == 1


async def test_draining() -> None:
    async with running_stand() as stand:
        stand.gateway.client.drain()
        response = await stand.post("/v1/completions", {**TEXT, "stream": True})
    assert error_of(response, 503)["code"] == "server_overloaded"


async def test_a_bug_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand() as stand:

        async def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(stand.gateway.client, "submit", broken)
        with structlog.testing.capture_logs() as logs:
            response = await stand.post("/v1/chat/completions", CHAT)
        counted = stand.metric(
            "tidegate_http_requests_total", route="/v1/chat/completions", method="POST", status="500"
        )
    assert error_of(response, 500)["type"] == "server_error"
    assert "secret" not in response.text
    assert counted == 1
    assert [entry["event"] for entry in logs] == ["request_failed", "request"]


@pytest.mark.parametrize("failure", [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError])
async def test_an_unreachable_store_is_a_503(monkeypatch: pytest.MonkeyPatch, failure: type[Exception]) -> None:
    async with running_stand() as stand:

        async def broken(*args: object, **kwargs: object) -> None:
            raise failure("unix:/secret/path")

        monkeypatch.setattr(stand.gateway.client, "submit", broken)
        response = await stand.post("/v1/chat/completions", CHAT)
    assert error_of(response, 503)["code"] == "server_overloaded"
    assert "secret" not in response.text


def test_every_reason_to_reject_has_its_status() -> None:
    tiers = make_tiers()
    for tier, refused in (("realtime", 503), ("bulk", 429)):
        statuses = {r: rejected(Rejected(r, "x", 1), tiers[tier]).status for r in RejectReason}
        assert statuses == {
            RejectReason.QUEUE_FULL: refused,
            RejectReason.OVERLOADED: 503,
            RejectReason.KEY_LIMIT: 429,
            RejectReason.DEADLINE: refused,
            RejectReason.NO_ENGINE: 503,
            RejectReason.DRAINING: 503,
            RejectReason.TIER_GONE: 503,
        }
