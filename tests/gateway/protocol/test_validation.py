"""Messages about wrong values, in plain words."""

from typing import Any

import pytest

from gateway.protocol.bodies.schemas import ChatCompletionRequest, parse_generation
from gateway.protocol.errors import ApiError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop": ""}, "Invalid value for 'stop': it must not be empty."),
        ({"stop": [*"abcdefghijklmnopq"]}, "Invalid value for 'stop': it must have at most 16 entries."),
        ({"stop": 5}, "Invalid type for 'stop': must be a string or an array of strings."),
        ({"messages": []}, "Invalid value for 'messages': it must not be empty."),
        ({"messages": "hello"}, "Invalid type for 'messages': it must be an array."),
        ({"messages": ["hello"]}, "Invalid type for 'messages[0]': it must be an object."),
        ({"temperature": 3}, "Invalid value for 'temperature': it must be at most 2."),
        ({"temperature": "1"}, "Invalid type for 'temperature': it must be a number."),
        ({"max_tokens": 1.5}, "Invalid type for 'max_tokens': it must be an integer."),
        ({"max_tokens": 0}, "Invalid value for 'max_tokens': it must be at least 1."),
        ({"stream": "yes"}, "Invalid type for 'stream': it must be true or false."),
        ({"model": 5}, "Invalid type for 'model': it must be a string."),
        ({"repetition_penalty": 0}, "Invalid value for 'repetition_penalty': it must be at least 0.01."),
        ({"safety_identifier": "x" * 65}, "Invalid value for 'safety_identifier': it must have at most 64 characters."),
        ({"truncation_side": "up"}, "Invalid value for 'truncation_side': it must be 'left' or 'right'."),
        ({"logit_bias": 5}, "Invalid type for 'logit_bias': it must be an object."),
        ({"model": None}, "Invalid type for 'model': it must be a string."),
    ],
)
def test_a_wrong_value_is_explained_in_words_of_json(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_generation(ChatCompletionRequest, {**CHAT, **change})
    assert error.value.message == message
