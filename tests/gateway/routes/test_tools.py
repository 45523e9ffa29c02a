"""Tools and formats over HTTP, through the official client in its strict mode. The stand's worker writes the calls."""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.interface import GRAMMAR_FAILED, FinishReason
from gateway.requests.tokens.tokenizer import Tokenizer
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.scripted_worker import answer_with, token_by_token
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL, pretrained, text_of, token_ids

# As Qwen's: tools in the first turn, calls with `tojson` of their arguments, results by name, and reasoning.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools{% for t in tools %} {{ t.function | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'tool' %} {{ m.name }}{% endif %}{{ '\n' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %}"
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}}]
FUNCTIONS: Any = [{"name": "add", "parameters": ADD}]
HI: Any = [{"role": "user", "content": "What is 1 + 2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
REQUIRED: Any = "required"


@cache
def tokenizer() -> Tokenizer:
    backend = Backend.from_str(pretrained().backend_tokenizer.to_str())
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)
    return Tokenizer(fast, max_model_len=2048)


def stand(text: str, **options: Any) -> Any:
    return running_stand(answer_with(text, **options), tokenizer=tokenizer())


async def test_a_call_in_a_whole_answer() -> None:
    async with stand("One moment.\n" + CALL) as running:
        answer = await running.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
        prompt = text_of(running.worker.served[0].prompt_token_ids)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "One moment."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert '<|im_start|>tools {"name": "add", "description": "Add.", "parameters": {"type": "object"' in prompt


async def test_the_deltas_of_a_call() -> None:
    async with stand(CALL) as running:
        stream = await running.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert choices[0].delta.role == "assistant"
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    first, *rest = deltas
    assert first.id and first.type == "function" and first.function is not None
    assert (first.function.name, first.function.arguments) == ("add", "")
    assert all(call.id is None and call.function is not None and call.function.name is None for call in rest)
    assert len(rest) > 5, "the arguments grow"
    arguments = "".join(call.function.arguments or "" for call in rest if call.function is not None)
    assert json.loads(arguments) == {"a": 1, "b": 2}
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert not any(choice.delta.content for choice in choices)


@pytest.mark.parametrize(
    ("choice", "finish"), [("required", "tool_calls"), ({"type": "function", "function": {"name": "add"}}, "stop")]
)
async def test_forced_calls(choice: Any, finish: str) -> None:
    async with stand(CALL) as running:
        answer = await running.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, tool_choice=choice)
        request: Request = running.worker.served[0]
    assert answer.choices[0].finish_reason == finish
    assert answer.choices[0].message.content is None and answer.choices[0].message.tool_calls
    assert request.sampling.grammar is not None and "add" in request.sampling.grammar


async def test_a_forced_call_that_is_cut_has_the_reason_length() -> None:
    async with stand(CALL[:30], reason=FinishReason.LENGTH) as running:
        answer = await running.client.chat.completions.create(
            model=MODEL, messages=HI, tools=TOOLS, tool_choice=REQUIRED
        )
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.content


@pytest.mark.parametrize(
    ("stop", "finish", "arguments"),
    [('"b', "stop", '{"a": 1, '), ("</tool_call>", "tool_calls", '{"a": 1, "b": 2}'), ("2", "stop", '{"a": 1, "b": ')],
)
async def test_a_call_that_a_stop_string_cuts_is_not_called_done(stop: str, finish: str, arguments: str) -> None:
    async with stand(CALL) as running:
        create = running.client.chat.completions.create
        answer = await create(model=MODEL, messages=HI, tools=TOOLS, stop=stop)
        stream = await create(model=MODEL, messages=HI, tools=TOOLS, stop=stop, stream=True)
        streamed = [chunk.choices[0].finish_reason async for chunk in stream]
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.arguments == arguments
    assert answer.choices[0].finish_reason == streamed[-1] == finish


async def test_the_older_functions_are_answered_in_their_own_shape() -> None:
    async with stand(CALL) as running:
        answer = await running.client.chat.completions.create(model=MODEL, messages=HI, functions=FUNCTIONS)
        stream = await running.client.chat.completions.create(
            model=MODEL, messages=HI, functions=FUNCTIONS, function_call={"name": "add"}, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "function_call" and message.tool_calls is None
    assert message.function_call is not None and message.function_call.name == "add"
    deltas = [choice.delta.function_call for choice in choices if choice.delta.function_call is not None]
    assert [delta.name for delta in deltas if delta.name] == ["add"]
    assert json.loads("".join(delta.arguments or "" for delta in deltas)) == {"a": 1, "b": 2}
    assert choices[-1].finish_reason == "stop"


async def test_two_turns_reach_the_template() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
    history: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    async with stand("It is 3.") as running:
        answer = await running.client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
        prompt = text_of(running.worker.served[0].prompt_token_ids)
    assert answer.choices[0].message.content == "It is 3." and answer.choices[0].finish_reason == "stop"
    expected = '<think>Hm.</think><tool_call>add a=1 b="x"</tool_call><|im_end|><|im_start|>tool add\n3<|im_end|>'
    assert expected in prompt


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("{bad", ' invalid_arguments="{bad"'), ("[1]", ' invalid_arguments="[1]"'), ("", ""), ({"a": 1}, " a=1")],
)
async def test_arguments_that_are_no_object(arguments: Any, shown: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    async with stand("a") as running:
        response = await running.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
        prompt = text_of(running.worker.served[0].prompt_token_ids)
    assert response.status_code == 200 and f"<tool_call>add{shown}</tool_call>" in prompt


async def test_older_calls_and_results_in_the_history() -> None:
    history: Any = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    async with stand("a") as running:
        await running.client.chat.completions.create(model=MODEL, messages=history)
        prompt = text_of(running.worker.served[0].prompt_token_ids)
    assert "<tool_call>add a=1</tool_call><|im_end|><|im_start|>tool add\n3<|im_end|>" in prompt


async def test_reasoning_is_split_off_and_counted() -> None:
    text = "<think>\nHm, well.\n</think>\n\nIt is 3."
    async with stand(text) as running:
        body = {"model": MODEL, "messages": HI}
        whole = (await running.post("/v1/chat/completions", body)).json()
        hidden = (await running.post("/v1/chat/completions", {**body, "include_reasoning": False})).json()
        stream = await running.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("It is 3.", *["Hm, well."] * 2)
    details = whole["usage"]["completion_tokens_details"]
    texts = [text_of(token_ids(text)[:length]) for length in range(len(token_ids(text)))]
    assert details["reasoning_tokens"] == sum("<think>" in shown and "</think>" not in shown for shown in texts)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["usage"]["completion_tokens_details"] == details
    assert "".join(delta.content or "" for delta in deltas) == "It is 3."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm, well."


async def test_a_grammar_that_fails_on_the_way_is_the_fault_of_the_request() -> None:
    def fails(request: Request) -> list[TokenEvent]:
        if request.sampling.grammar is None:
            return token_by_token(request, token_ids("a"))
        return [TokenEvent(request.id, EventKind.FAILED, 0, error=f"{GRAMMAR_FAILED} cannot be followed: too complex")]

    async with running_stand(fails, tokenizer=tokenizer()) as running:
        body = {"model": MODEL, "messages": HI, "guided_regex": "a+"}
        response = await running.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "too complex" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"include_reasoning": "no"}, "include_reasoning"),
    ],
)
async def test_wrong_shapes_are_refused(change: dict[str, Any], param: str) -> None:
    async with stand("a") as running:
        response = await running.post("/v1/chat/completions", {"model": MODEL, "messages": HI, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"].startswith(param)
