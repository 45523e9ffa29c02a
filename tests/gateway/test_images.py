"""Images in chats of every API: passed on to a server that takes them, counted, and refused elsewhere."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import FinishReason
from gateway.jobs.batches.input.prompt_text import prompt_bytes, prompt_parts
from gateway.protocol.bodies.schemas import ChatCompletionRequest, parse_generation
from gateway.requests.prepare.images import passed_on
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import CHAT_VERSION, EventKind, Request, TokenEvent
from tests.gateway.routes.test_vectors import batch_lines
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, token_ids

IMAGE_TOKENS = 100
DATA = "iVBORw0KGgo="
URL = f"data:image/png;base64,{DATA}"
HI = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
FAR = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/cat.png"}}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": [HI, IMAGE]}]}
CALL = {"name": "look", "arguments": "{}"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def counted(request: Request) -> Sequence[TokenEvent]:
    """Return the events of an answer whose server has counted 77 tokens in the prompt."""
    ids = token_ids("A cat.")
    return [TokenEvent(request.id, EventKind.FINISHED, 0, ids, FinishReason.STOP, prompt_tokens=77, cached_tokens=5)]


def of_chat(stand: Stand) -> dict[str, Any]:
    """Return what the newest request passes on."""
    request = stand.worker.served[-1]
    assert request.version == CHAT_VERSION, "an older worker must not take it for a chat without images"
    chat: dict[str, Any] = json.loads(request.chat)
    return chat


async def test_a_chat_with_images_is_passed_on_as_it_came() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [HI, IMAGE, FAR], "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c", "content": [IMAGE]},
    ]
    options = {"tools": TOOLS, "chat_template_kwargs": {"depth": 2}, "max_tokens": 9}
    async with running_stand(counted, image_tokens=5) as stand:
        answer = await stand.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **options})
        assert answer.status_code == 200, answer.text
        chat = of_chat(stand)
    assert (chat["messages"], chat["chat_template_kwargs"]) == (messages, {"depth": 2})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["look"]
    assert (chat["max_tokens"], chat["tool_choice"]) == (9, "none")
    assert answer.json()["choices"][0]["message"]["content"] == "A cat."


async def test_images_count_as_the_operator_says_until_the_server_has_counted() -> None:
    async with running_stand(counted, image_tokens=IMAGE_TOKENS) as stand:
        answer = (await stand.post("/v1/chat/completions", CHAT)).json()
        with_image = stand.worker.served[-1]
        assert "max_tokens" not in of_chat(stand)
        await stand.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [HI]}]})
        without = stand.worker.served[-1]
        two = {**CHAT, "messages": [{"role": "user", "content": [IMAGE, IMAGE, IMAGE]}]}
        too_many = await stand.post("/v1/chat/completions", two)
    assert len(with_image.prompt_token_ids) == len(without.prompt_token_ids) + IMAGE_TOKENS
    assert with_image.max_total_tokens == CONTEXT and not without.chat
    assert answer["usage"]["prompt_tokens"] == 77
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_limit_that_was_lowered_is_left_to_the_server() -> None:
    """It was lowered by an estimate."""
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "text", "text": "hi"}, {"type": "image", "source": source}]
    body = {"model": MODEL, "max_tokens": 10_000, "messages": [{"role": "user", "content": content}]}
    async with running_stand(counted, image_tokens=IMAGE_TOKENS) as stand:
        assert (await stand.post("/v1/messages", body)).status_code == 200
        assert "max_tokens" not in of_chat(stand)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "IMAGE"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "IMAGE"}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
    ],
)
async def test_a_model_without_images_refuses_them_by_name(path: str, body: dict[str, Any]) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    body = json.loads(json.dumps(body).replace('"IMAGE"', json.dumps([image])))
    async with running_stand() as stand:
        refused = await stand.post(path, {"model": MODEL, **body})
    assert refused.status_code == 400
    assert "this model takes no images here, only text" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("option", "unsupported", "param"),
    [
        ({"truncate_prompt_tokens": 5}, (), "truncate_prompt_tokens"),
        ({"return_token_ids": True}, (), "return_token_ids"),
        ({"logprobs": True}, ("images+logprobs",), "logprobs"),
        ({"tools": TOOLS}, ("images+tools",), "tools"),
        ({}, ("images",), "messages"),
    ],
)
async def test_what_does_not_go_with_images_is_refused_by_name(option: Any, unsupported: Any, param: str) -> None:
    other = WorkerStatus("w2", (MODEL,), CONTEXT, 1000, 0, unsupported=unsupported)
    async with running_stand(counted, image_tokens=5, workers=[other]) as stand:
        refused = await stand.post("/v1/chat/completions", {**CHAT, **option})
        text = {**CHAT, "messages": [{"role": "user", "content": "hi"}], **option, "logprobs": None}
        assert (await stand.post("/v1/chat/completions", text)).status_code == 200
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_tokens_of_images_are_counted_and_not_listed() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
    async with running_stand(image_tokens=IMAGE_TOKENS) as stand:
        refused = await stand.post("/tokenize", {"messages": CHAT["messages"]})
        counted_tokens = (await stand.post("/v1/messages/count_tokens", body)).json()["input_tokens"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[1]")
    assert IMAGE_TOKENS < counted_tokens < 2 * IMAGE_TOKENS


async def test_models_say_whether_they_take_images() -> None:
    for image_tokens in (0, 5):
        async with running_stand(image_tokens=image_tokens) as stand:
            model = (await stand.http.get(f"/v1/models/{MODEL}")).json()
            headers = {"anthropic-version": "2023-06-01"}
            anthropic = (await stand.http.get(f"/v1/models/{MODEL}", headers=headers)).json()
        assert model["capabilities"]["vision"] is bool(image_tokens)
        assert anthropic["capabilities"]["image_input"] == {"supported": bool(image_tokens)}


async def test_images_of_responses_are_passed_on_and_kept() -> None:
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": URL}],
    }
    seen = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]},
    ]
    async with running_stand(counted, image_tokens=5) as stand:
        first = (await stand.post("/v1/responses", {"model": MODEL, "input": [item]})).json()
        second = {"model": MODEL, "input": seen, "previous_response_id": first["id"]}
        assert (await stand.post("/v1/responses", second)).json()["status"] == "completed"
        messages = of_chat(stand)["messages"]
        kept = (await stand.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
    assert messages[0] == {"role": "user", "content": [HI, image]}
    assert messages[-1] == {"role": "tool", "tool_call_id": "c", "content": [image], "name": "look"}
    assert kept[0]["content"][1] == {"type": "input_image", "image_url": URL, "detail": "auto"}


async def test_images_of_messages_are_passed_on() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "hi"}]
    messages = [
        {"role": "user", "content": "Look:"},
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]},
    ]
    async with running_stand(counted, image_tokens=5) as stand:
        answer = await stand.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": messages})
        assert answer.status_code == 200, answer.text
        user, _, tool = of_chat(stand)["messages"]
    image = {"type": "image_url", "image_url": {"url": URL}}
    assert user == {"role": "user", "content": [{"type": "text", "text": "Look:"}, image, HI]}
    assert tool == {"role": "tool", "tool_call_id": "t", "content": [image, HI]}


async def test_lines_of_a_batch_may_have_images() -> None:
    async with running_stand(counted, image_tokens=5) as stand:
        [line] = await batch_lines(stand, "/v1/chat/completions", [CHAT])
        assert of_chat(stand) == {"messages": CHAT["messages"]}
    assert line["response"]["body"]["usage"]["prompt_tokens"] == 77


def test_an_image_of_a_batch_is_no_text_of_its_length() -> None:
    def body(data: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [HI, {"type": "image_url", "image_url": {"url": data}}]}]}

    large, other = f"data:image/png;base64,{'Qk0+' * 10_000}", f"data:image/png;base64,{'Qk0/' * 10_000}"
    assert prompt_parts(body(large)) == (["user", "text", "hi"], 1024)
    assert len(prompt_bytes(body(large))) < 200 and prompt_bytes(body(large)) != prompt_bytes(body(other))


TEXTS = st.builds(lambda text: {"type": "text", "text": text}, st.text())
URLS = st.text(min_size=1).map(lambda text: {"type": "image_url", "image_url": {"url": text}})
DETAILED = URLS.map(lambda part: {**part, "image_url": {**part["image_url"], "detail": "high"}})
CONTENTS = st.lists(TEXTS | URLS | DETAILED, min_size=1)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": CONTENTS})
)


@given(messages=MESSAGES, limit=st.none() | st.integers(1, 99))
def test_the_server_gets_the_messages_that_the_client_sent(messages: Any, limit: int | None) -> None:
    body = {"model": MODEL, "messages": [*messages, *CHAT["messages"]], "max_tokens": limit}
    chat = json.loads(passed_on(parse_generation(ChatCompletionRequest, body), {}, limit or 50))
    assert chat == {"messages": body["messages"]} | ({} if limit is None else {"max_tokens": limit})
