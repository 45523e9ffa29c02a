"""The body of a request for a dialect, and whether a sequence may be continued from its tokens.

Knows sampling parameters and dialects; does not know connections.
"""

import json
from typing import Any

import msgspec

from engine.interface import SamplingParams
from engine.streaming import StreamRequest, UpstreamRefused, json_schema_of
from engine.upstream.dialects import Dialect

_DEFAULTS = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}
# Parameters whose effect depends on the tokens generated so far. A server takes those for a part of the prompt when a
# sequence is continued, so the continuation would not be the same.
_DEPEND_ON_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words", "logprobs", "prompt_logprobs", "grammar")


def can_continue(sampling: SamplingParams, is_seeded: bool) -> bool:
    """Return whether a continued sequence has the same distribution as one that was never hung up.

    A seed that the user chose promises the same tokens, which a continuation cannot give unless decoding is greedy.
    """
    if is_seeded and sampling.temperature > 0:
        return False
    return all(getattr(sampling, name) == _DEFAULTS[name] for name in _DEPEND_ON_OUTPUT)


def body_of(
    request: StreamRequest, dialect: Dialect, model: str, prompt: Any, *, with_priority: bool = True
) -> dict[str, Any]:
    """Return the body of a request for what is left of a sequence.

    `prompt` is what the dialect takes as the prompt: the known tokens, or their text. Raises `UpstreamRefused` if the
    dialect cannot honour a parameter.
    """
    sampling, num_done = request.sampling, len(request.output_token_ids)
    body: dict[str, Any] = {**dialect.fixed, dialect.prompt: prompt}
    if dialect.path.startswith("/v1/"):
        body["model"] = model
    if dialect.salt and request.cache_salt:
        body[dialect.salt] = request.cache_salt
    elif dialect.name == "llama.cpp" and request.cache_salt:
        body["cache_prompt"] = False  # it has no salts: nothing is shared between callers
    if dialect.priority and with_priority:
        body[dialect.priority] = -request.priority if dialect.lower_first else request.priority
    params = body.setdefault(dialect.sampling_in, {}) if dialect.sampling_in else body
    params[dialect.max_tokens] = sampling.max_tokens - num_done
    params["temperature"] = sampling.temperature
    if dialect.name == "llama.cpp":  # penalties count all tokens: newer servers have no number that says so
        params["repeat_last_n"] = len(request.prompt_token_ids) + sampling.max_tokens
    # A sequence that cannot be continued begins again after a fault, and must get the same tokens. Others get no seed:
    # servers sample slower with one. One that is continued would get the random numbers of its beginning again.
    needs_seed = dialect.repeats and (bool(request.chat) or not can_continue(sampling, request.is_seeded))
    if (request.is_seeded or needs_seed) and not num_done:
        params[dialect.seed] = sampling.seed
    params |= _options(sampling, dialect, num_done)
    _add_logprobs(body, params, sampling, dialect)
    _add_schema(params, sampling, dialect)
    return body


def chat_body_of(request: StreamRequest, dialect: Dialect, model: str, *, with_priority: bool = True) -> dict[str, Any]:
    """Return the body of a request for a chat with images. What the request says of the chat is passed on as it is.

    Without a limit of the client's, none is sent: only the server knows how many tokens the images leave.
    """
    chat = msgspec.json.decode(request.chat, type=dict[str, msgspec.Raw])
    body = body_of(request, dialect, model, chat["messages"], with_priority=with_priority)
    del body[dialect.max_tokens]
    return body | chat


def _options(sampling: SamplingParams, dialect: Dialect, num_done: int) -> dict[str, Any]:
    """Return the parameters that differ from their defaults by the names of the dialect.

    For llama.cpp, those with other defaults on the server's side are always sent.
    """
    options: dict[str, Any] = {}
    for name, sent_as in dialect.sampling.items():
        value = getattr(sampling, name)
        if name == "min_tokens":
            value = max(0, min(value, sampling.max_tokens) - num_done)
        if value != _DEFAULTS[name] or (dialect.name == "llama.cpp" and name in _LLAMA_DIFFERS):
            options[sent_as] = _encoded(name, value, dialect)
    return options


_LLAMA_DIFFERS = ("top_k", "top_p", "min_p", "repetition_penalty")


def _encoded(name: str, value: Any, dialect: Dialect) -> Any:
    if name == "logit_bias":
        pairs = [[token_id, bias] for token_id, bias in value]
        return pairs if dialect.name == "llama.cpp" else {str(token_id): bias for token_id, bias in pairs}
    return list(value) if isinstance(value, tuple) else value


def _add_logprobs(body: dict[str, Any], params: dict[str, Any], sampling: SamplingParams, dialect: Dialect) -> None:
    if sampling.logprobs is None:
        return
    if not dialect.logprobs:
        raise UpstreamRefused(f"A server of the kind {dialect.name!r} reports no log probabilities by token ids.")
    params[dialect.logprobs] = max(1, sampling.logprobs) if dialect.name == "llama.cpp" else sampling.logprobs
    if dialect.name == "vllm":
        body["return_tokens_as_token_ids"] = True


def _add_schema(params: dict[str, Any], sampling: SamplingParams, dialect: Dialect) -> None:
    if sampling.grammar is None:
        return
    schema = json_schema_of(sampling.grammar)
    if schema is None or not dialect.json_schema:
        raise UpstreamRefused(f"A server of the kind {dialect.name!r} cannot follow this grammar.")
    schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    outer, _, inner = dialect.json_schema.partition(".")
    value = json.dumps(schema) if dialect.name == "sglang" else schema
    # Weak models would never end free white space, which our own grammars do not allow either.
    params[outer] = {inner: value, "disable_any_whitespace": True} if inner else value
