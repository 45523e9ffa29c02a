"""The layout of tools, calls and results: the same in training and in the chat template, and compact."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo_model.location import demo_model_path
from demo_model.training.tool_corpus import tool_turn
from demo_model.training.tool_requests import Exchange
from demo_model.training.tools import Call, Tool, write_calls, write_tools

WEATHER = Tool("get_weather", "Get the weather of a city.", (("city", "string"),))
ADD = Tool("add", "", (("a", "integer"), ("b", "number")))
CALLS = (Call("get_weather", {"city": "Zürich"}), Call("add", {"a": 1, "b": 2.5}))
EXCHANGE = Exchange('What is "it"?', CALLS, ("sunny", '{"result": 3.5}'))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def history(calls: list[dict[str, Any]], content: str | None = None) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": EXCHANGE.prompt},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *({"role": "tool", "content": result, "tool_call_id": "call_1"} for result in EXCHANGE.results),
        {"role": "assistant", "content": EXCHANGE.answer},
    ]


def listed(tokenizer: PreTrainedTokenizerBase, function: dict[str, Any]) -> Any:
    """Return what the prompt says of one offered tool."""
    text = render(tokenizer, [{"role": "user", "content": "Hi"}], [{"type": "function", "function": function}])
    return json.loads(text.split("\n")[1])


def test_training_and_serving_lay_out_the_same_text(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = history([call.as_openai("call_1") for call in CALLS])
    served = render(tokenizer, messages, [WEATHER.as_openai(), ADD.as_openai()])
    trained = "".join(segment.text for segment in tool_turn(EXCHANGE))
    assert served == f"<|system|>{write_tools([WEATHER, ADD])}<|end|>{trained}"


def test_a_conversation_shows_tools_calls_and_results(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = history([CALLS[0].as_openai("call_1")], content="I look.")
    assert render(tokenizer, messages[:2] + messages[3:4], [WEATHER.as_openai()]) == (
        "<|system|><tools>\n"
        '{"description": "get weather: Get the weather of a city.", "name": "get_weather", '
        '"arguments": {"city": "string"}}\n'
        '</tools><|end|><|user|>What is "it"?<|end|>'
        "<|assistant|>I look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call><|end|>'
        '<|user|><tool_response>\n{"result": 3.5}\n</tool_response><|end|>'
    )


def test_arguments_may_be_an_object_or_its_json(tokenizer: PreTrainedTokenizerBase) -> None:
    objects = [call.as_openai("call_1") for call in CALLS]
    texts = [call.as_openai("call_1") for call in CALLS]
    for call in texts:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    assert render(tokenizer, history(objects)) == render(tokenizer, history(texts))
    assert write_calls(CALLS) in render(tokenizer, history(objects))


@pytest.mark.parametrize("arguments", [None, {}, "{}", ""])
def test_a_call_without_arguments_has_an_empty_object(tokenizer: PreTrainedTokenizerBase, arguments: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    assert '{"name": "now", "arguments": {}}' in render(tokenizer, history([call]))


def test_only_a_descriptions_first_line_is_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    function = {"name": "get_time", "description": "Get the time.\n\nArgs:\n    zone: …"}
    assert listed(tokenizer, function) == {
        "description": "get time: Get the time.",
        "name": "get_time",
        "arguments": {},
    }


def test_only_required_arguments_are_shown_if_any_is_required(tokenizer: PreTrainedTokenizerBase) -> None:
    properties = {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": ["integer"]},
    }
    function = {"name": "weather", "parameters": {"type": "object", "properties": properties, "required": ["city"]}}
    assert listed(tokenizer, function)["arguments"] == {"city": "string"}
    del function["parameters"]["required"]  # type: ignore[attr-defined]
    everything = {"city": "string", "unit": "celsius|fahrenheit", "days": "string"}
    assert listed(tokenizer, function)["arguments"] == everything
