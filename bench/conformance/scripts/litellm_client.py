"""LiteLLM as a library: chat, stream, tools, text completion, responses."""

import litellm
from checks import API_KEY, BASE_URL, MODEL, check, main

AT = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@check
def chat() -> None:
    """chat and its stream"""
    assert litellm.completion(**AT, messages=HELLO).choices[0].message.content
    parts = litellm.completion(**AT, messages=HELLO, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts)


@check
def tool() -> None:
    """a required tool"""
    answer = litellm.completion(**AT, messages=HELLO, tools=[TOOL], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@check
def text() -> None:
    """text completion"""
    where = AT | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(**where, prompt="Tidegate is").choices[0].text


@check
def responses() -> None:
    """responses"""
    assert litellm.responses(**AT, input="Hello!").output


main()
