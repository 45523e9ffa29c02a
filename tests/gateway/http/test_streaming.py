"""Streams: bytes on the wire, order of chunks, usage, hang-ups, and failures before and after the first frame."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.interface import FinishReason
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.scripted_worker import answer_with, token_by_token
from tests.gateway.stand import Stand, make_tiers, running_stand, serving_stand
from tests.gateway.tiny_model import MODEL, token_ids
from tests.waiting import until

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": HI, "stream": True}


async def frames_of(stand: Stand, path: str, body: dict[str, Any]) -> list[str]:
    """Return the frames of a stream, after a check that each is `data: <one line>` and an empty line."""
    response = await stand.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    text = response.content.decode("utf-8")
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert all("\n" not in frame and "\r" not in frame for frame in frames)
    return frames


def chunks_of(frames: Sequence[str]) -> list[dict[str, Any]]:
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1] if frame != ": ping"]


async def test_the_frames_of_a_chat() -> None:
    async with running_stand("Tide 😀!\n") as stand:
        chunks = chunks_of(await frames_of(stand, "/v1/chat/completions", CHAT))
    heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"
    assert heads[0]["service_tier"] == "default"
    assert "usage" not in heads[0]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": "", "refusal": None},
        "logprobs": None,
        "finish_reason": None,
    }
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in choices[1:-1])
    assert "".join(c["delta"]["content"] for c in choices[1:-1]) == "Tide 😀!\n"
    assert not any("\ufffd" in c["delta"]["content"] for c in choices[1:-1])


async def test_the_frames_of_a_completion() -> None:
    body = {"model": MODEL, "prompt": "a", "stream": True, "service_tier": "flex"}
    async with running_stand(answer_with("xyz", reason=FinishReason.LENGTH)) as stand:
        chunks = chunks_of(await frames_of(stand, "/v1/completions", body))
    assert all(c["object"] == "text_completion" and c["service_tier"] == "flex" for c in chunks)
    assert all(c["id"].startswith("cmpl-") for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in choices) == "xyz"
    assert [c["finish_reason"] for c in choices][-1] == "length"
    assert all(set(c) == {"index", "text", "logprobs", "finish_reason"} for c in choices)


async def test_usage_comes_last_when_asked_for() -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    async with running_stand(answer_with("abc", cached=2)) as stand:
        chunks = chunks_of(await frames_of(stand, "/v1/chat/completions", body))
        num_prompt = len(stand.worker.served[0].prompt_token_ids)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == num_prompt
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["total_tokens"] == num_prompt + 3
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("service_tier", ["default", "flex"])
async def test_choices_interleave_by_index(service_tier: str) -> None:
    """Pieces of the choices are sent as they come, not one choice after another."""
    got: list[tuple[int, str]] = []
    ends: dict[int, str] = {}
    create_body = {"model": MODEL, "messages": HI, "n": 3, "stream": True, "service_tier": service_tier}
    async with running_stand(lambda request: []) as stand:
        creating = asyncio.create_task(stand.client.chat.completions.create(**create_body))  # type: ignore[call-overload]
        await until(lambda: len(stand.worker.served) == 3)
        ids = sorted(request.id for request in stand.worker.served)
        for position, letter in enumerate("abcd"):
            for index, request_id in enumerate(ids):
                message = [letter_event(request_id, position, letter)]
                await stand.worker.events.publish({stand.gateway.client.gateway_id: message})
                while (index, letter) not in got:  # the next token is sent only when this one has arrived
                    (choice,) = (await anext(await creating)).choices
                    got += [(choice.index, choice.delta.content)] if choice.delta.content else []
                    ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        ends |= {chunk.choices[0].index: chunk.choices[0].finish_reason async for chunk in await creating}
    assert got == [(index, letter) for letter in "abcd" for index in range(3)]
    assert ends == dict.fromkeys(range(3), "stop")


def letter_event(request_id: str, position: int, letter: str) -> TokenEvent:
    if letter == "d":
        return TokenEvent(request_id, EventKind.FINISHED, position, token_ids(letter), FinishReason.STOP)
    return TokenEvent(request_id, EventKind.TOKENS, position, token_ids(letter))


async def test_a_stopped_choice_is_cancelled_while_others_go_on() -> None:
    def script(request: Request) -> list[TokenEvent]:
        text = "go stop " + "more " * 2000 if request.id.endswith("-0") else "slow"
        return token_by_token(request, token_ids(text))[: None if text != "slow" else 1]

    async with running_stand(script) as stand:
        body = {**CHAT, "stop": "stop", "n": 2}
        async with stand.http.stream("POST", "/v1/chat/completions", json=body):
            await until(lambda: len(stand.worker.cancelled) == 1)
            assert stand.worker.cancelled[0].endswith("-0")
            assert stand.waiting == 1
        await until(lambda: len(stand.worker.cancelled) == 2)


@pytest.mark.trap(14)
@pytest.mark.parametrize("stop", ["wo t", "two tx"], ids=["a stop string", "one that it is not after all"])
async def test_a_requeue_in_a_stop_string_loses_neither_its_tail_nor_usage(stop: str) -> None:
    """Trap 14: held-back text stays held back, and repeated tokens are neither sent nor counted again."""
    ids = token_ids("one two three")
    body = {**CHAT, "stop": stop, "stream_options": {"include_usage": True}}
    seen = []
    async with running_stand() as stand:
        for come_before in (0, *range(len(token_ids("one tw")), len(token_ids("one two t")) + 1)):

            def script(request: Request, come_before: int = come_before) -> list[TokenEvent]:
                whole = token_by_token(request, ids, cached=2)
                return [*whole[:come_before], *whole]

            stand.worker.script = script
            chunks = chunks_of(await frames_of(stand, "/v1/chat/completions", body))
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
            seen.append((text, chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]))
    undisturbed, *requeued = seen
    assert undisturbed[:2] == ("one two three".partition(stop)[0], "stop")
    assert undisturbed[2]["prompt_tokens_details"]["cached_tokens"] == 2
    assert len(requeued) >= 3 and all(answer == undisturbed for answer in requeued)


async def test_pings_keep_a_silent_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.requests.generate.service.PING_S", 0.001)
    async with running_stand() as stand:
        stand.worker.gate.clear()
        async with stand.http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
            stand.worker.gate.set()
            rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_is_cancelled_at_once(path: str, stream: bool) -> None:
    def script(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, EventKind.TOKENS, 0, token_ids("ab"))]

    body = {"model": MODEL, "messages": HI, "prompt": "a", "stream": stream, "n": 2}
    async with serving_stand(script) as stand:
        async with httpx.AsyncClient(base_url=stand.url, verify=False, timeout=30) as http:
            request = asyncio.create_task(http.send(http.build_request("POST", path, json=body), stream=True))
            await until(lambda: len(stand.worker.served) == 2)
            if stream:
                response = await request
                assert await anext(response.aiter_bytes())
                await response.aclose()
            else:
                request.cancel()
        await until(lambda: len(stand.worker.cancelled) == 2)
        assert sorted(stand.worker.cancelled) == sorted(r.id for r in stand.worker.served)
        await until(lambda: stand.metric("tidegate_client_disconnects_total", tier="realtime") == 1)
        await until(lambda: stand.waiting == 0)
        labels = {"route": path, "method": "POST", "status": "499"}
        await until(lambda: stand.metric("tidegate_http_requests_total", **labels) == 1)


async def test_a_failure_in_the_stream_is_a_frame() -> None:
    async with running_stand(lambda r: [TokenEvent(r.id, EventKind.TOKENS, 0, token_ids("ab"))]) as stand:
        stream = await stand.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        assert (await anext(stream)).choices[0].delta.content == "ab"
        failed = TokenEvent(stand.worker.served[0].id, EventKind.FAILED, 2, error="secret")
        await stand.worker.events.publish({stand.gateway.client.gateway_id: [failed]})
        with pytest.raises(openai.APIError) as error:
            await anext(stream)
    assert error.value.type == "server_error"
    assert "secret" not in str(error.value)


async def test_what_a_shutdown_cuts_off_gets_503_and_may_be_retried() -> None:
    """Before the first token it is an HTTP error, later an error frame with the same code; never a 500."""
    reason = "The server is shutting down."
    async with running_stand(lambda r: [TokenEvent(r.id, EventKind.TOKENS, 0, token_ids("ab"))]) as stand:
        whole = asyncio.create_task(stand.post("/v1/chat/completions", {**CHAT, "stream": False}))
        stream = await stand.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        assert (await anext(stream)).choices[0].delta.content == "ab"
        await until(lambda: stand.waiting == 2)
        stand.gateway.client.fail_open(reason)
        response = await whole
        with pytest.raises(openai.APIError, match=reason) as error:
            await anext(stream)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_overloaded")
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert (error.value.type, error.value.code) == ("server_error", "server_overloaded")


async def test_silence_ends_in_a_timeout() -> None:
    async with running_stand(tiers=make_tiers(realtime={"timeout_ms": 30})) as stand:
        stand.worker.claims = False
        response = await stand.post("/v1/chat/completions", CHAT)
        assert stand.waiting == 0
        assert (await stand.gateway.client.depths())["realtime"] == 0
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert response.headers["x-should-retry"] == "false"


async def test_silence_after_the_first_token_ends_in_a_frame() -> None:
    tiers = make_tiers(realtime={"timeout_ms": 200})
    first = answer_with("ab", reason=FinishReason.STOP)
    async with running_stand(lambda r: first(r)[:1], tiers=tiers) as stand:
        response = await stand.post("/v1/chat/completions", CHAT)
        await until(lambda: len(stand.worker.cancelled) == 1)
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
