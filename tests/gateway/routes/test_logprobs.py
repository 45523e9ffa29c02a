"""Log probabilities, echo and token ids of both endpoints, streamed or not, through the official client."""

import json
from typing import Any

import pytest

from engine.interface import FinishReason, TokenLogprobs
from gateway.requests.prepare import prompts
from scheduler.client.token_stream import HeldLogprobs
from scheduler.request import Request, TokenEvent
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, token_ids

HI = [{"role": "user", "content": "hi"}]
END = 1  # <|im_end|>
OTHER = token_ids("x")[0]


def logprob_of(token_id: int) -> float:
    return -token_id / 1000


def scored(token_id: int, num_top: int) -> TokenLogprobs:
    """Return log probabilities of a token that is never among the likeliest ones."""
    top = tuple((OTHER + n, -0.001 * (n + 1)) for n in range(num_top))
    return TokenLogprobs(token_id, logprob_of(token_id), top)


def answer(text: str, *after: int, reason: FinishReason = FinishReason.STOP) -> Any:
    """Return a script that answers `text` and the tokens `after`, with the log probabilities that are requested."""

    def script(request: Request) -> list[TokenEvent]:
        params = request.sampling
        events = []
        for event in token_by_token(request, (*token_ids(text), *after)[: params.max_tokens], reason):
            found = () if params.logprobs is None else tuple(scored(t, params.logprobs) for t in event.token_ids)
            prompt: tuple[TokenLogprobs, ...] = ()
            if params.prompt_logprobs is not None and event.index == 0:
                prompt = tuple(scored(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:])
            events.append(
                TokenEvent(
                    request.id, event.kind, event.index, event.token_ids, event.finish_reason, "", 0, found, prompt
                )
            )
        return events

    return script


async def chunks_of(stand: Stand, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await stand.post(path, {"model": MODEL, "stream": True, **body})
    assert response.status_code == 200, response.text
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


async def test_a_chat_reports_each_token_that_it_shows() -> None:
    async with running_stand(answer("Tide 😀", END)) as stand:
        whole = await stand.client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
        stream = await stand.client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, top_logprobs=2, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Tide 😀"
    found = whole.choices[0].logprobs
    assert found is not None and found.content is not None
    assert bytes(byte for entry in found.content for byte in entry.bytes or ()) == "Tide 😀".encode()
    assert [entry.logprob for entry in found.content] == [logprob_of(t) for t in token_ids("Tide 😀")]
    assert found.content[-1].token == "\\x80"
    assert [len(entry.top_logprobs) for entry in found.content] == [2] * len(found.content)
    assert found.content[0].top_logprobs[0].token == "x"
    streamed = [e for c in chunks if (p := c.choices[0].logprobs) is not None for e in p.content or ()]
    assert streamed == found.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Tide 😀"


async def test_a_completion_reports_tokens_with_their_places() -> None:
    async with running_stand(answer("a 😀 b")) as stand:
        whole = await stand.client.completions.create(model=MODEL, prompt="x", logprobs=1)
        chunks = await chunks_of(stand, "/v1/completions", {"prompt": "x", "logprobs": 1})
    found = whole.choices[0].logprobs
    assert found is not None and found.tokens is not None
    assert found.tokens == ["a", " ", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", " ", "b"]
    assert found.text_offset == [0, 1, 2, 2, 2, 2, 3, 4]
    assert found.token_logprobs == [logprob_of(t) for t in token_ids("a 😀 b")]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {"x": -0.001, "a": found.token_logprobs[0]}
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [value for part in parts for value in part[name]] == getattr(found, name), name


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "tokens"),
    [("wo", "one t", ["o", "n", "e", " t"]), ("e t", "on", ["o", "n"])],
)
async def test_tokens_of_a_stop_string_are_not_reported(stop: str, shown: str, tokens: list[str], stream: bool) -> None:
    body = {"prompt": "x", "logprobs": 0, "stop": stop}
    async with running_stand(answer("one two")) as stand:
        if stream:
            choices = [chunk["choices"][0] for chunk in await chunks_of(stand, "/v1/completions", body)]
        else:
            choices = (await stand.post("/v1/completions", {"model": MODEL, **body})).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == shown
    assert [t for choice in choices for t in (choice["logprobs"] or {}).get("tokens", [])] == tokens
    assert choices[-1]["finish_reason"] == "stop"


async def test_stop_token_ids_end_the_output_and_are_hidden() -> None:
    (end,) = token_ids("!")
    body = {"model": MODEL, "prompt": "x", "stop_token_ids": [end]}
    async with running_stand(answer("done!")) as stand:
        hidden = (await stand.post("/v1/completions", body)).json()
        shown = (await stand.post("/v1/completions", {**body, "include_stop_str_in_output": True})).json()
        assert [request.sampling.stop_token_ids for request in stand.worker.served] == [(end,)] * 2
    assert hidden["choices"][0]["text"] == "done"
    assert hidden["choices"][0]["stop_reason"] == end
    assert hidden["usage"]["completion_tokens"] == len(token_ids("done!"))
    assert shown["choices"][0]["text"] == "done!"


async def test_echo_comes_before_the_output() -> None:
    """As lm-eval-harness asks for it: prompts of token ids, and one token of output that it throws away."""
    prompt = list(token_ids("the tide"))
    async with running_stand(answer("!")) as stand:
        body = {"model": MODEL, "prompt": [prompt, prompt], "echo": True, "logprobs": 1, "max_tokens": 1}
        choices = (await stand.post("/v1/completions", {**body, "temperature": 0, "seed": 1234})).json()["choices"]
        streamed = await chunks_of(stand, "/v1/completions", {**body, "prompt": prompt})
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        assert choice["text"] == "the tide!"
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == "the tide!"
        assert found["token_logprobs"] == [None, *(logprob_of(t) for t in (*prompt[1:], *token_ids("!")))]
        assert found["top_logprobs"][0] is None
        assert all(len(top) == 2 for top in found["top_logprobs"][1:])
        texts = [found["tokens"][:i] for i in range(len(found["tokens"]))]
        assert found["text_offset"] == [len("".join(before)) for before in texts]
    assert streamed[0]["choices"][0]["text"] == "the tide!"
    assert streamed[0]["choices"][0]["logprobs"] == choices[0]["logprobs"]


@pytest.mark.parametrize(
    ("end", "reason"),
    [(END, FinishReason.STOP), (END, FinishReason.LENGTH), (token_ids("😀")[0], FinishReason.LENGTH)],
)
async def test_each_generated_token_has_an_entry_even_if_it_shows_no_text(end: int, reason: FinishReason) -> None:
    """lm-eval takes `token_logprobs[ctxlen:-1]` as the continuation's, so the last entry must be the generated token's.

    The token may end the output, be skipped as a special one, or be a part of a character.
    """
    prompt = list(token_ids("the tide"))
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    async with running_stand(answer("", end, reason=reason)) as stand:
        found = (await stand.post("/v1/completions", {"model": MODEL, **body})).json()["choices"][0]["logprobs"]
        chunks = await chunks_of(stand, "/v1/completions", body)
    assert found["token_logprobs"] == [None, *(logprob_of(t) for t in (*prompt[1:], end))]
    assert len(found["top_logprobs"]) == len(found["tokens"]) == len(prompt) + 1
    assert found["text_offset"][-1] == len("the tide")
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [value for part in parts for value in part["token_logprobs"]] == found["token_logprobs"]


async def test_a_prompt_is_scored_without_output() -> None:
    body = {"model": MODEL, "prompt": "the tide", "echo": True, "logprobs": 0, "max_tokens": 0}
    async with running_stand(answer("!")) as stand:
        scored = (await stand.post("/v1/completions", body)).json()
        assert stand.worker.served[0].sampling.prompt_logprobs == 0
        streamed = await chunks_of(stand, "/v1/completions", body)
    choice = scored["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the tide", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *(logprob_of(t) for t in token_ids("the tide")[1:])]
    assert scored["usage"]["completion_tokens"] == 0
    assert [chunk["choices"][0]["text"] for chunk in streamed] == ["the tide", ""]


async def test_prompt_logprobs_in_the_form_of_vllm() -> None:
    async with running_stand(answer("!")) as stand:
        chat = (await stand.post("/v1/chat/completions", {"model": MODEL, "messages": HI, "prompt_logprobs": 1})).json()
        prompt = stand.worker.served[0].prompt_token_ids
        text = (await stand.post("/v1/completions", {"model": MODEL, "prompt": "ab", "prompt_logprobs": 0})).json()
    found = chat["prompt_logprobs"]
    assert found[0] is None and len(found) == len(prompt)
    assert found[1] == {
        str(prompt[1]): {"logprob": logprob_of(prompt[1]), "rank": None, "decoded_token": "user"},
        str(OTHER): {"logprob": -0.001, "rank": 1, "decoded_token": "x"},
    }
    assert chat["choices"][0]["logprobs"] is None
    assert [list(entry or ()) for entry in text["choices"][0]["prompt_logprobs"]] == [[], [str(token_ids("b")[0])]]


async def test_token_ids_are_returned_with_those_that_show_no_text() -> None:
    asked = {"return_token_ids": True, "logprobs": 0}
    async with running_stand(answer("hello", END)) as stand:
        text = (await stand.post("/v1/completions", {"model": MODEL, "prompt": "ab", **asked})).json()["choices"][0]
        chat_body = {"messages": HI, "return_token_ids": True}
        chat = (await stand.post("/v1/chat/completions", {"model": MODEL, **chat_body})).json()
        chunks = await chunks_of(stand, "/v1/chat/completions", chat_body)
        prompt = list(stand.worker.served[-1].prompt_token_ids)
    ids = [*token_ids("hello"), END]
    assert (text["text"], text["token_ids"], text["prompt_token_ids"]) == ("hello", ids, list(token_ids("ab")))
    assert len(text["logprobs"]["tokens"]) == len(ids)
    assert (chat["choices"][0]["token_ids"], chat["prompt_token_ids"]) == (ids, prompt)
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ids
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [prompt]


async def test_the_best_of_several_is_answered() -> None:
    """The mean decides, not the sum: a longer output is not worse."""
    texts = {0: "zz", 1: "aaaa", 2: "m"}

    def script(request: Request) -> list[TokenEvent]:
        return answer(texts[int(request.id.rsplit("-", 1)[1])])(request)  # type: ignore[no-any-return]

    async with running_stand(script) as stand:
        body = {"model": MODEL, "prompt": "x", "best_of": 3, "n": 2}
        found = (await stand.post("/v1/completions", body)).json()
        one = (await stand.post("/v1/completions", {**body, "n": 1})).json()
    assert logprob_of(token_ids("a")[0]) > logprob_of(token_ids("m")[0]) > logprob_of(token_ids("z")[0])
    assert [(c["index"], c["text"], c["logprobs"]) for c in found["choices"]] == [(0, "aaaa", None), (1, "m", None)]
    assert found["usage"]["completion_tokens"] == sum(len(token_ids(text)) for text in texts.values())
    assert found["usage"]["prompt_tokens"] == 1
    assert [c["text"] for c in one["choices"]] == ["aaaa"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 9, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x" * 9, "logprobs": 1, "echo": True}, "logprobs"),
        ("/v1/completions", {"prompt": ["x" * 5] * 2, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/chat/completions", {"messages": HI, "n": 3, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_the_log_probabilities_of_prompts_are_bounded(
    path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_LOGPROBS", 16)
    async with running_stand(answer("a")) as stand:
        refused = await stand.post(path, {"model": MODEL, **body})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        accepted = await stand.post("/v1/completions", {"model": MODEL, "prompt": "x" * 8, "prompt_logprobs": 1})
    assert accepted.status_code == 200


async def test_an_answer_with_too_many_log_probabilities_is_refused_and_a_stream_of_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 4}
    text = "the tide comes in, and the tide goes out"
    num_logprobs = 5 * (len(token_ids(text)) + 1)
    async with running_stand(answer(text, END)) as stand:
        monkeypatch.setattr(stand.gateway.client, "_held_logprobs", HeldLogprobs(num_logprobs))
        refused = await stand.post("/v1/chat/completions", body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "answer_too_large"), refused.text
        assert "as a stream" in error["message"]
        for _ in range(3):  # what was sent takes no room
            streamed = await chunks_of(stand, "/v1/chat/completions", body)
            assert "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed) == text
        assert (await stand.post("/v1/chat/completions", {**body, "max_tokens": 4})).status_code == 200
        asked = {"model": MODEL, "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 4}
        failed = await stand.post("/v1/responses", asked)  # its end repeats all of them
        assert (failed.status_code, failed.json()["error"]["code"]) == (400, "answer_too_large"), failed.text
