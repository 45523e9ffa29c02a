"""Fields that both completion endpoints have beside OpenAI's common ones: sampling, the prompt, and what is reported.

Knows types and ranges. Does not know the model: whether a token id exists is checked where the model's limits are known
(gateway/requests/prepare/sampling.py). Most of the fields are extensions of vLLM.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from gateway.protocol.json_body import Body

MAX_TOP = 20  # likeliest tokens reported for a position, as in OpenAI's chat API and by default in vLLM
MAX_TOKEN_IDS = 1024  # entries of a list or mapping of single token ids
MAX_BAD_WORDS = 128  # each step compares the output with all of them
INT64 = 2**63

T = TypeVar("T")


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an int: JSON does not tell 1.0 from 1, so some clients send it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=0, le=2**31), Whole]
TokenId = Annotated[int, Field(ge=0, le=2**31), Whole]
TokenIdList = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP), Whole]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


def _few_biases(value: T) -> T:
    """Refuse a mapping with too many entries before its entries are checked."""
    if isinstance(value, dict) and len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"must have at most {MAX_TOKEN_IDS} entries")
    return value


LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[0-9]{1,10}$")],
        Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
    ],
    BeforeValidator(_few_biases),
]


class Options(Body):
    # sampling
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # It multiplies and divides logits: a factor beyond these limits would make them infinite.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[TokenIdList, Field(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    # the end of the output
    min_tokens: Count | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # the prompt
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31), Whole] | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None
    # what is reported
    prompt_logprobs: NumTop | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # no effect: these tokenizers put no spaces there
    detokenize: bool | None = None
    # the request
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    priority: Annotated[int, Field(ge=-INT64, lt=INT64), Whole] | None = None
