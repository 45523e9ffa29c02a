"""POST /v1/completions through the official client, and the entry point of batch lines."""

import pytest

from gateway.requests.prepare.placement import Placement
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.stand import make_tiers, running_stand
from tests.gateway.tiny_model import MODEL, token_ids

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


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "stream": True}, 400, "stream"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"model": "other", "messages": HI}, 404, "model"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/moderations", {}, 404, "url"),
    ],
)
async def test_an_invalid_batch_line_is_a_status_and_no_exception(
    endpoint: str, body: dict[str, object], status: int, param: str
) -> None:
    async with running_stand() as stand:
        got, answer = await stand.gateway.models.main.completions.complete(endpoint, {"model": MODEL, **body}, LINE)
    assert (got, answer["error"]["param"]) == (status, param)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [(EventKind.FAILED, 500, None), (EventKind.CANCELLED, 503, "server_overloaded")],
)
async def test_a_batch_line_whose_generation_fails(kind: EventKind, status: int, code: str | None) -> None:
    async with running_stand(lambda r: [TokenEvent(r.id, kind, error="why")]) as stand:
        body = {"model": MODEL, "prompt": "a"}
        got, answer = await stand.gateway.models.main.completions.complete("/v1/completions", body, LINE)
    assert (got, answer["error"]["code"]) == (status, code)
