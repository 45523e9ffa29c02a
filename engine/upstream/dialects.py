"""The dialects of servers that stream tokens, as data: paths, names of fields, names of metrics.

Knows what each kind of server calls things, and what it cannot do. Does not send anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from engine.interface import SamplingParams

DialectName = Literal["vllm", "sglang", "llama.cpp", "plain"]
# Fields of `SamplingParams` that every request has, or that `bodies` translates by itself.
_GENERAL = frozenset({"max_tokens", "seed", "temperature", "grammar", "logprobs"})


CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Metrics:
    """The names of a server's own metrics. They lag by seconds, so they only calibrate."""

    running: str
    waiting: str
    kv_usage: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of server takes requests."""

    name: DialectName
    owned_by: tuple[str, ...]  # values of `owned_by` in /v1/models by which such a server is recognised
    path: str
    prompt: str  # name of the field with the prompt
    max_tokens: str
    sampling: Mapping[str, str]  # fields of `SamplingParams` by their names in the body
    sampling_in: str = ""  # field that holds the sampling parameters; empty: they are in the body itself
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that are always sent
    seed: str = "seed"
    usage_last: bool = False  # whether an event after the last token says how many tokens were cached
    repeats: bool = False  # whether the same seed gives the same token ids
    salt: str = ""  # field for the salt of the prefix cache; empty: there is none
    priority: str = ""
    lower_first: bool = False  # whether lower priorities go first
    json_schema: str = ""  # "field" or "field.field"; empty: output cannot follow a schema
    logprobs: str = ""
    takes_ids: bool = True  # whether prompts and outputs are token ids; otherwise they are texts
    metrics: Metrics | None = None
    properties: str = ""  # path of a JSON object with the server's `total_slots`; empty: there is none

    @property
    def is_chat(self) -> bool:
        """Whether the server gets messages and applies the chat template itself."""
        return self.path == CHAT_PATH

    @property
    def unsupported(self) -> frozenset[str]:
        """The fields of `SamplingParams` that the server cannot honour.

        `grammar` stands for grammars other than JSON schemas, and `json_schema` for these.
        """
        known = _GENERAL | self.sampling.keys()
        missing = {f.name for f in msgspec.structs.fields(SamplingParams) if f.name not in known} | {"grammar"}
        missing |= {"json_schema"} - ({"json_schema"} if self.json_schema else set())
        missing |= {"logprobs"} - ({"logprobs"} if self.logprobs else set())
        return frozenset(missing)


_OPENAI = {name: name for name in ("top_p", "presence_penalty", "frequency_penalty")}
_USUAL = _OPENAI | {name: name for name in ("top_k", "min_p", "repetition_penalty")}

VLLM = Dialect(
    name="vllm",
    owned_by=("vllm", "tidegate"),
    path="/v1/completions",
    prompt="prompt",
    max_tokens="max_tokens",
    sampling=_USUAL
    | {name: name for name in ("logit_bias", "allowed_token_ids", "min_tokens", "stop_token_ids", "ignore_eos")},
    fixed={
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    },
    usage_last=True,
    repeats=True,
    salt="cache_salt",
    priority="priority",
    lower_first=True,
    json_schema="structured_outputs.json",
    logprobs="logprobs",
    metrics=Metrics("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
)
SGLANG = Dialect(
    name="sglang",
    owned_by=("sglang",),
    path="/generate",
    prompt="input_ids",
    max_tokens="max_new_tokens",
    sampling=_USUAL
    | {"min_tokens": "min_new_tokens", "logit_bias": "logit_bias"}
    | {name: name for name in ("stop_token_ids", "ignore_eos")},
    sampling_in="sampling_params",
    fixed={"stream": True},
    seed="sampling_seed",  # has no effect without --enable-deterministic-inference; older versions do not know it
    salt="extra_key",
    priority="priority",
    json_schema="json_schema",
    metrics=Metrics("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
)
LLAMA_CPP = Dialect(
    name="llama.cpp",
    owned_by=("llamacpp",),
    path="/completion",
    prompt="prompt",
    max_tokens="n_predict",
    sampling=_OPENAI
    | {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}
    | {"logit_bias": "logit_bias", "ignore_eos": "ignore_eos"},
    fixed={
        "stream": True,
        "return_tokens": True,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    },
    usage_last=True,
    repeats=True,
    json_schema="json_schema",
    logprobs="n_probs",
    metrics=Metrics("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio"),
    properties="/props",
)
PLAIN = Dialect(
    name="plain",
    owned_by=(),
    path="/v1/completions",
    prompt="prompt",
    max_tokens="max_tokens",
    sampling=_USUAL,
    fixed={"stream": True},
    takes_ids=False,
)
DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (VLLM, SGLANG, LLAMA_CPP, PLAIN)}

# The chat endpoints of the same servers, for chats with images. Only vLLM's reports token ids there.
_CHAT = Dialect(
    name="plain",
    owned_by=(),
    path=CHAT_PATH,
    prompt="messages",
    max_tokens="max_tokens",
    sampling=_USUAL,
    fixed={**PLAIN.fixed, "stream_options": {"include_usage": True}},
    usage_last=True,
    takes_ids=False,
)
CHAT_DIALECTS: Mapping[str, Dialect] = {
    "vllm": replace(
        VLLM,
        path=CHAT_PATH,
        prompt="messages",
        fixed={name: VLLM.fixed[name] for name in ("stream", "stream_options", "return_token_ids")},
        logprobs="",
    ),
    "sglang": replace(
        _CHAT,
        name="sglang",
        fixed={**_CHAT.fixed, "separate_reasoning": False},
        salt=SGLANG.salt,
        priority=SGLANG.priority,
    ),
    "llama.cpp": replace(
        _CHAT, name="llama.cpp", sampling=LLAMA_CPP.sampling, fixed={**_CHAT.fixed, "reasoning_format": "none"}
    ),
    "plain": _CHAT,
}


def recognise(owned_by: str) -> Dialect:
    """Return the dialect of a server by the `owned_by` of its models: `plain` if it is none of the known servers."""
    return next((dialect for dialect in DIALECTS.values() if owned_by in dialect.owned_by), PLAIN)
