"""POST /v1/completions through the official client, and the entry point of batch lines."""

import threading
from typing import Any

import pytest

from gateway.protocol.bodies.schemas import parse_generation
from gateway.protocol.json_body import INLINE_SIZE
from gateway.requests.generate import service
from gateway.requests.prepare.placement import Placement
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.stand import make_tiers, running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, token_ids

HI = [{"role": "user", "content": "hi"}]

LINE = Placement(make_tiers()["batch"], "flex", "req_1", is_limited=False)  # of a batch


def echo(request: Request) -> list[TokenEvent]:
    """Answer each prompt with its text backwards."""
    return token_by_token(request, request.prompt_token_ids[::-1])


async def test_a_string() -> None:
    async with running_stand() as stand:
        answer = await stand.client.completions.create(model=MODEL, prompt="hi")
        request = stand.worker.served[0]
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello there!"
    assert answer.choices[0].logprobs is None
    assert request.prompt_token_ids == token_ids("hi")
    assert request.sampling.max_tokens == 16


async def test_the_default_output_shrinks_to_the_room_there_is() -> None:
    async with running_stand() as stand:
        await stand.client.completions.create(model=MODEL, prompt=[1] * (CONTEXT - 3))
        assert stand.worker.served[0].sampling.max_tokens == 3


async def test_prompts_and_samples_are_numbered() -> None:
    async with running_stand(echo) as stand:
        answer = await stand.client.completions.create(model=MODEL, prompt=["ab", "xyz"], n=2, seed=5)
        seeds = sorted(r.sampling.seed for r in stand.worker.served)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ba"), (1, "ba"), (2, "zyx"), (3, "zyx")]
    assert seeds == [5, 5, 6, 6]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)


async def test_token_ids() -> None:
    ids = list(token_ids("the"))
    async with running_stand(echo) as stand:
        await stand.client.completions.create(model=MODEL, prompt=ids)
        await stand.client.completions.create(model=MODEL, prompt=[ids, [7]])
        prompts = sorted(r.prompt_token_ids for r in stand.worker.served)
    assert prompts == sorted([tuple(ids), tuple(ids), (7,)])


async def test_a_batch_line_gets_status_and_body() -> None:
    async with running_stand() as stand:

        async def complete(endpoint: str, **body: object) -> tuple[int, dict[str, object]]:
            return await stand.gateway.completions.complete(endpoint, {"model": MODEL, **body}, LINE)

        status, body = await complete("/v1/chat/completions", messages=HI, service_tier="priority")
        assert (status, body["id"], body["service_tier"]) == (200, "chatcmpl-1", "flex")
        assert stand.worker.served[0].tier == "batch"
        status, body = await complete("/v1/completions", prompt=["a", "b"])
        assert status == 200
        assert len(body["choices"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "stream": True}, 400, "stream"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"model": "other", "messages": HI}, 404, "model"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/embeddings", {}, 404, "url"),
    ],
)
async def test_an_invalid_batch_line_is_a_status_and_no_exception(
    endpoint: str, body: dict[str, object], status: int, param: str
) -> None:
    async with running_stand() as stand:
        got, answer = await stand.gateway.completions.complete(endpoint, {"model": MODEL, **body}, LINE)
    assert (got, answer["error"]["param"]) == (status, param)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_a_large_batch_line_is_validated_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def watched(kind: Any, body: dict[str, Any]) -> Any:
        threads.append(threading.current_thread())
        return parse_generation(kind, body)

    monkeypatch.setattr(service, "parse_generation", watched)
    async with running_stand() as stand:
        for prompt in ("a", "x" * INLINE_SIZE):
            body = {"model": MODEL, "prompt": prompt}
            await stand.gateway.completions.complete("/v1/completions", body, LINE)
    assert threads[0] is threading.main_thread() is not threads[1]


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [(EventKind.FAILED, 500, None), (EventKind.CANCELLED, 503, "server_overloaded")],
)
async def test_a_batch_line_whose_generation_fails(kind: EventKind, status: int, code: str | None) -> None:
    async with running_stand(lambda r: [TokenEvent(r.id, kind, error="why")]) as stand:
        body = {"model": MODEL, "prompt": "a"}
        got, answer = await stand.gateway.completions.complete("/v1/completions", body, LINE)
    assert (got, answer["error"]["code"]) == (status, code)
