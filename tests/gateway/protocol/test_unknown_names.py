"""Names that the server does not know: misspelt ones and those of other servers."""

import pytest

from gateway.protocol.bodies.schemas import ChatCompletionRequest
from gateway.protocol.bodies.unsupported import unknown_names
from gateway.protocol.errors import ApiError

CHAT = ChatCompletionRequest.model_fields


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("topP", "top_p"),
        ("presence_penality", "presence_penalty"),
        ("response_formats", "response_format"),
        ("logprob", "logprobs"),
        ("stop_token_id", "stop_token_ids"),
        ("logit_processors", "logits_processors"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(ApiError, match=f"'{name}'. Did you mean '{meant}'?") as error:
        unknown_names({"model": "m", name: 1}, CHAT)
    assert (error.value.param, error.value.code) == (name, "unknown_parameter")
