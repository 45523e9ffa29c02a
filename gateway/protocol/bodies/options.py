"""Fields that several endpoints have: those of all that generate something, and those of both completion endpoints.

Knows types and ranges. Does not know the model: whether a token id exists is checked where the model's limits are known
(gateway/requests/prepare/sampling.py).
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PrivateAttr

from gateway.protocol.bodies.messages import Text
from gateway.protocol.json_body import Body

MAX_TOP = 20  # likeliest tokens reported for a position, as in OpenAI's chat API and by default in vLLM
MAX_TOKEN_IDS = 1024  # entries of a list or mapping of single token ids
MAX_BAD_WORDS = 128  # each step compares the output with all of them
MAX_PAIRS = 16  # key-value pairs of metadata
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


def _few_pairs(value: Any) -> Any:
    """Refuse a mapping with too many pairs before its items are checked. Pydantic would check the items first."""
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise ValueError(f"must have at most {MAX_PAIRS} pairs")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], BeforeValidator(_few_pairs)
]


class GenerationBody(Body):
    """The fields that the bodies of all endpoints have in common which generate something."""

    _ignored: tuple[str, ...] = PrivateAttr(())
    _routed: Any = PrivateAttr(None)

    model: Text
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    metadata: Metadata | None = None
    service_tier: Text | None = None
    user: Text | None = None
    stream: bool | None = None
    # An extension of vLLM: a number below 0 asks for a higher tier, one above 0 for a lower one.
    priority: Annotated[int, Field(ge=-INT64, lt=INT64), Whole] | None = None

    @property
    def routed(self) -> Any:
        """The `gateway.requests.prepare.routing.Routed` of the rule that chose the tier; None if there is none."""
        return self._routed

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """The names in the body that this server does not know."""
        return self._ignored


class Options(Body):
    """Extensions of vLLM, and OpenAI's options of sampling."""

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
