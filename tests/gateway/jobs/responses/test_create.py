"""POST /v1/responses without streaming, and what it refuses."""

from typing import Any

import openai
import pytest

from engine.interface import FinishReason
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, text_of, token_ids

IMAGE_FILE = {"type": "input_image", "file_id": "file-1"}


async def test_a_plain_response() -> None:
    async with running_stand(answer_with("Hello there!", cached=3)) as stand:
        response = await stand.client.responses.create(
            model=MODEL,
            input="hi",
            instructions="be brief",
            temperature=0.5,
            max_output_tokens=20,
            metadata={"a": "b"},
            reasoning={"effort": "low"},
            user="u",
        )
        request = stand.worker.served[0]
    assert response.id.startswith("resp_")
    assert response.status == "completed"
    assert response.output_text == "Hello there!"
    assert response.instructions == "be brief"
    assert response.metadata == {"a": "b"}
    assert response.service_tier == "default"
    assert response.temperature == 0.5 and response.top_p == 1.0
    assert response.completed_at is not None and response.completed_at >= response.created_at
    assert response.usage is not None
    assert response.usage.input_tokens == len(request.prompt_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == len(token_ids("Hello there!"))
    assert request.sampling.temperature == 0.5
    assert request.sampling.max_tokens == 20
    assert text_of(request.prompt_token_ids) == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    )


async def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    async with running_stand(answer_with("cut", reason=FinishReason.LENGTH)) as stand:
        response = await stand.client.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None


@pytest.mark.parametrize(
    ("body", "param", "way_out"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": 3}, "input", "string or an array"),
        ({"input": [{"type": "web_search", "id": "x"}]}, "input[0]", "function_call_output"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "empty"),
        ({"input": [{"type": "mcp_call", "id": "x"}, {"role": "user", "content": 3}]}, "input[1].content", "array"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "takes no images",
        ),
        ({"input": [{"role": "user", "content": [IMAGE_FILE]}]}, "input[0].content[0]", "image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "input_text"),
        ({"tools": [{"name": "f"}]}, "tools[0]", "a type"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format", "definition"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "function"),
        ({"messages": []}, "messages", "'input'"),
        ({"max_tokens": 3}, "max_tokens", "'max_output_tokens'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'text.format'"),
        ({"n": 2}, "n", "one answer"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "'stream'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "'schema'"),
        ({"include": ["everything"]}, "include[0]", "reasoning.encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"max_output_tokens": 10_000}, "max_output_tokens", "at most 245"),
        ({"seed": "x"}, "seed", "integer"),
        ({"background": True, "store": False}, "background", "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'input'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "'input'"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str, way_out: str) -> None:
    async with running_stand(response_ttl_s=0) as stand:
        answer = await stand.post("/v1/responses", {"model": MODEL, "input": "hi", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert way_out in error["message"], error


async def test_truncation_leaves_out_the_first_turns_that_do_not_fit() -> None:
    turns: list[Any] = [{"role": "system", "content": "rules"}]
    for number in range(12):
        turns += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    turns.append({"role": "user", "content": "last"})
    async with running_stand() as stand:
        with pytest.raises(openai.BadRequestError) as caught:
            await stand.client.responses.create(model=MODEL, input=turns, max_output_tokens=20)
        response = await stand.client.responses.create(
            model=MODEL, input=turns, max_output_tokens=20, truncation="auto"
        )
        request = stand.worker.served[0]
        with pytest.raises(openai.BadRequestError):
            await stand.client.responses.create(
                model=MODEL, input=turns[:-1] + [{"role": "user", "content": "x" * 999}], truncation="auto"
            )
    assert caught.value.code == "context_length_exceeded"
    assert response.truncation == "auto"
    prompt = text_of(request.prompt_token_ids)
    assert prompt.startswith("<|im_start|>system\nrules<|im_end|><|im_start|>user\nquestion")
    assert prompt.endswith("user\nlast<|im_end|><|im_start|>assistant\n")
    turn = len(token_ids("<|im_start|>user\nquestion 1<|im_end|><|im_start|>assistant\nanswer 1<|im_end|>"))
    assert CONTEXT - 20 - turn - 4 < len(request.prompt_token_ids) <= CONTEXT - 20  # as many turns as fit


async def test_unknown_parameters_are_named_and_misspelt_ones_refused() -> None:
    async with running_stand() as stand:
        named = await stand.post("/v1/responses", {"model": MODEL, "input": "hi", "something_new": 1})
        refused = await stand.post("/v1/responses", {"model": MODEL, "input": "hi", "max_output_token": 1})
    assert named.status_code == 200
    assert named.headers["x-tidegate-ignored-parameters"] == "something_new"
    assert refused.json()["error"]["param"] == "max_output_token"
    assert "'max_output_tokens'" in refused.json()["error"]["message"]
