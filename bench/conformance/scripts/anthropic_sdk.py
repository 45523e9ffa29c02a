"""Anthropic's own client: messages, streams, tools, structured output, token counts, models and batches."""

import time

from anthropic import Anthropic, BadRequestError, NotFoundError, beta_tool
from checks import API_KEY, BASE_URL, MODEL, check, main
from pydantic import BaseModel

client = Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=API_KEY, _strict_response_validation=True)
QUESTION = [{"role": "user", "content": "How much is 17 + 25?"}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}
BATCH_TIMEOUT_S = 60.0


class Sum(BaseModel):
    first: int
    second: int


@check
def message() -> None:
    """a message is answered, with usage"""
    answer = client.messages.create(model=MODEL, max_tokens=64, messages=QUESTION, extra_body=GREEDY)
    assert answer.content[0].text and answer.usage.output_tokens > 0 and answer._request_id


@check
def stream() -> None:
    """a streamed message gives the same text, and usage at its end"""
    whole = client.messages.create(model=MODEL, max_tokens=64, messages=QUESTION, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=64, messages=QUESTION, extra_body=GREEDY) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason


@check
def system_and_large_maximum() -> None:
    """a system prompt in blocks, and a maximum of output tokens that no context could hold"""
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(model=MODEL, max_tokens=64_000, messages=QUESTION, system=system) as events:
        assert events.get_final_message().content


@check
def prefix_cache() -> None:
    """the same prompt again is read from the cache, and the usage says so"""
    system = "Tidegate serves chat and batches on one GPU. " * 20
    asked = {"model": MODEL, "max_tokens": 4, "messages": QUESTION, "system": system}
    first, second = client.messages.create(**asked).usage, client.messages.create(**asked).usage
    assert second.cache_read_input_tokens > 0
    total = [usage.input_tokens + usage.cache_read_input_tokens for usage in (first, second)]
    assert total[0] == total[1]


@check
def tool_loop() -> None:
    """a forced tool is called, its result goes back, and the second turn is answered"""
    asked = {"model": MODEL, "max_tokens": 128, "tools": [WEATHER]}
    first = client.messages.create(messages=PARIS, tool_choice={"type": "any"}, **asked)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather" and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    turns = [*PARIS, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, **asked).content


@check
def streamed_tool() -> None:
    """the input of a call streams as deltas that the client puts together"""
    with client.messages.stream(
        model=MODEL,
        max_tokens=128,
        messages=PARIS,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert "input_json" in kinds and final.content[-1].input.keys() == {"city"}


@check
def runner() -> None:
    """tool_runner calls a function of Python and returns the last message"""
    seen = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city

        Args:
            city: The city
        """
        seen.append(city)
        return "sunny, 21 degrees"

    run = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=256, messages=PARIS, tools=[get_weather], extra_body=GREEDY
    )
    assert run.until_done().content[0].text and seen == ["Paris"]


@check
def parse() -> None:
    """messages.parse gives an object of the schema"""
    answer = client.messages.parse(model=MODEL, max_tokens=256, messages=QUESTION, output_format=Sum, extra_body=GREEDY)
    assert isinstance(answer.parsed_output, Sum)


@check
def count() -> None:
    """count_tokens counts what a message then reports"""
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=4, messages=QUESTION).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@check
def models() -> None:
    """the models are listed and looked up in Anthropic's shape"""
    listed = [model.id for model in client.models.list()]
    assert MODEL in listed and client.models.retrieve(MODEL).max_input_tokens > 0


@check
def batch() -> None:
    """a batch of three messages is created, ends, gives its results, and is deleted"""
    requests = [
        {"custom_id": f"n{n}", "params": {"model": MODEL, "max_tokens": 8, "messages": QUESTION}} for n in range(3)
    ]
    made = client.messages.batches.create(requests=requests)
    began_s = time.monotonic()
    while (found := client.messages.batches.retrieve(made.id)).processing_status != "ended":
        assert time.monotonic() - began_s < BATCH_TIMEOUT_S, "the batch takes too long"
        time.sleep(0.2)
    assert found.request_counts.succeeded == 3
    results = {line.custom_id: line.result for line in client.messages.batches.results(made.id)}
    assert results.keys() == {"n0", "n1", "n2"} and results["n0"].message.content
    assert made.id in [listed.id for listed in client.messages.batches.list()]
    assert client.messages.batches.delete(made.id).id == made.id


@check
def errors() -> None:
    """an unknown model and a prompt that is too long are errors that the client knows"""
    try:
        client.messages.create(model="claude-none", max_tokens=8, messages=QUESTION)
    except NotFoundError as error:
        assert error.type == "not_found_error"
    else:
        raise AssertionError("no error")
    try:
        client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "a b " * 50_000}])
    except BadRequestError as error:
        assert "prompt is too long: " in str(error)
    else:
        raise AssertionError("no error")


main()
