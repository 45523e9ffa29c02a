"""The official client, which validates each answer strictly."""

import asyncio
import json

from checks import API_KEY, BASE_URL, MODEL, check, main
from openai import AsyncOpenAI, NotFoundError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, _strict_response_validation=True)
QUESTION = [{"role": "user", "content": "How much is 17 + 25?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER_TOOL = {"type": "function", "strict": True, **WEATHER["function"]}


class Sum(BaseModel):
    first: int
    second: int


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


@check
def chat() -> None:
    """a chat is answered, with usage"""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0


@check
def stream() -> None:
    """a streamed chat gives the same text, and usage at its end"""
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


@check
def parse() -> None:
    """chat.completions.parse gives an object of the schema"""
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Sum, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Sum)


@check
def open_ended() -> None:
    """chat.completions.parse gives an object of strings and lists of strings, ended within max_tokens"""
    question = [{"role": "user", "content": "Alice and Bob are going to a science fair on Friday."}]
    for _ in range(5):
        answer = client.chat.completions.parse(model=MODEL, messages=question, response_format=Event, max_tokens=200)
        assert isinstance(answer.choices[0].message.parsed, Event)


@check
def json_object() -> None:
    """json_object gives an object, ended within max_tokens"""
    kind = {"type": "json_object"}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=kind, max_tokens=200)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check
def forced_tool() -> None:
    """a required tool is called, its result goes back, and the second turn is answered"""
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required")
    call = first.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and first.choices[0].finish_reason == "tool_calls"
    messages += [
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content


@check
def streamed_tool() -> None:
    """a tool call streams as deltas that the client puts together"""
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER | {"function": WEATHER["function"] | {"strict": True}}],
        tool_choice="required",
    ) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments.keys() == {"city"}


@check
def auto_tool() -> None:
    """with tool_choice auto, the model calls the tool that fits, and answers plainly where none fits"""
    tool = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        temperature=0,
    )
    calls = tool.choices[0].message.tool_calls
    assert calls and '"Paris"' in calls[0].function.arguments
    plain = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello!"}], tools=[WEATHER], temperature=0
    )
    assert plain.choices[0].message.content and not plain.choices[0].message.tool_calls


@check
def logprobs() -> None:
    """log probabilities of a chat and of a completion, and echo for scoring"""
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=3, max_tokens=4)
    assert 1 <= len(chat.choices[0].logprobs.content) <= 4
    lenient = OpenAI(base_url=BASE_URL, api_key=API_KEY)  # the client's types allow no null for the first token
    scored = lenient.completions.create(model=MODEL, prompt="Tidegate is", max_tokens=0, echo=True, logprobs=1)
    found = scored.choices[0].logprobs
    assert found.token_logprobs[0] is None and all(value <= 0 for value in found.token_logprobs[1:])


@check
def responses() -> None:
    """a response, its stream, and the next turn by previous_response_id"""
    first = client.responses.create(model=MODEL, input="Count from 1 to 5", temperature=0)
    with client.responses.stream(model=MODEL, input="Count from 1 to 5", temperature=0) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_response()
    assert first.output_text == streamed.output_text != ""
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    second = client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
    assert second.output_text


@check
def parsed_response() -> None:
    """responses.parse gives an object of the schema"""
    answer = client.responses.parse(model=MODEL, input="How much is 17 + 25?", text_format=Sum)
    assert isinstance(answer.output_parsed, Sum)


@check
def response_tool() -> None:
    """a response calls a required function"""
    answer = client.responses.create(
        model=MODEL, input="What is the weather in Paris?", tools=[WEATHER_TOOL], tool_choice="required"
    )
    assert [item.type for item in answer.output] == ["function_call"]


@check
async def two_hundred() -> None:
    """200 chats at once, with the client's defaults, are all answered"""
    async with AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0) as many:
        answers = await asyncio.gather(
            *(many.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8) for _ in range(200))
        )
    assert len(answers) == 200


@check
def unknown_model() -> None:
    """an unknown model is a NotFoundError with a code"""
    try:
        client.chat.completions.create(model="none", messages=QUESTION)
    except NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("no error")


main()
