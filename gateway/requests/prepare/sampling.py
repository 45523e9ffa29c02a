"""Turn the sampling options of a body into the engine's sampling parameters.

Knows bodies, the model's recommended values and its vocabulary, and what engines cannot do: workers say it in their
heartbeats. Does not know prompts or tiers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from engine.interface import SamplingParams
from engine.streaming import IMAGES, options_of
from gateway.protocol.bodies.schemas import MAX_PROMPT_IDS, AnyRequest
from gateway.protocol.errors import invalid_value
from gateway.requests.tokens.model_files import SamplingDefaults
from gateway.requests.tokens.tokenizer import RunInThread, Tokenizer
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import Request

# Parameters of bodies that become sampling parameters of other names.
_PARAMS = {"grammar": "response_format", "json_schema": "response_format", IMAGES: "messages"}
_WHAT = {"grammar": "a grammar that is no JSON schema", "json_schema": "a JSON schema", IMAGES: "images"}
SEED_MASK = 2**63 - 1  # maps an int64 seed of a body to a non-negative seed, as the engine requires

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the output may be, as tokens and grammars that are the same for all sequences of a request."""

    grammar: str | None = None  # serialised for the engine
    bad_words: tuple[tuple[int, ...], ...] = ()


async def constraints_of(
    request: AnyRequest, grammar: str | None, tokenizer: Tokenizer, run: RunInThread
) -> Constraints:
    """Return the constraints of a request whose output has `grammar`. Long texts are encoded by `run`.

    A bad word is forbidden at the beginning of a text and after a space, as in vLLM. Raises `ApiError` 400 if the
    constraints may leave no token.
    """
    if grammar is not None and request.allowed_token_ids:
        raise invalid_value(
            "allowed_token_ids", "Invalid value for 'allowed_token_ids': it cannot be used with a format or tools."
        )
    if not request.bad_words:
        return Constraints(grammar)
    words = [word.lstrip() or word for word in request.bad_words]
    texts = [text for word in words for text in (word, f" {word}")]
    encoded = await tokenizer.encode(texts, MAX_PROMPT_IDS, add_special_tokens=False, run=run)
    return Constraints(grammar, tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids)))


def check_token_ids(request: AnyRequest, vocab_size: int) -> None:
    """Check that the token ids in the sampling options are of the model. Raises `ApiError` 400 if one is not."""
    _check("logit_bias", map(int, request.logit_bias or ()), vocab_size)
    _check("allowed_token_ids", request.allowed_token_ids or (), vocab_size)
    _check("stop_token_ids", request.stop_token_ids or (), vocab_size)


def sampling_params(
    request: AnyRequest,
    defaults: SamplingDefaults,
    max_tokens: int,
    seed: int,
    constraints: Constraints,
    adapter: str | None = None,
) -> SamplingParams:
    """Return the sampling parameters of one sequence that may have `max_tokens` tokens of output."""
    top_p = _or(request.top_p, defaults.top_p)
    top_k = _or(request.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max(1, max_tokens),  # the engine generates a token also where only the prompt is to be scored
        temperature=_or(request.temperature, defaults.temperature) if top_p > 0 else 0.0,
        top_p=top_p if top_p > 0 else 1.0,  # 0 leaves only the likeliest token: greedy
        top_k=max(0, top_k),  # all tokens are meant by -1 in vLLM's API, and by 0 in the engine
        min_p=_or(request.min_p, defaults.min_p),
        seed=seed & SEED_MASK,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items()),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words=constraints.bad_words,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=0 if request.chooses_best and request.num_logprobs is None else request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        grammar=constraints.grammar,
        adapter=adapter,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    if any(token_id >= vocab_size for token_id in token_ids):
        raise invalid_value(param, f"Invalid value for '{param}': token ids must be less than {vocab_size}.")


def unsupported_by(workers: Iterable[WorkerStatus]) -> frozenset[str]:
    """Return the options that one of the live workers cannot honour, as `Upstream.unsupported` names them."""
    return frozenset().union(*(worker.unsupported for worker in workers))


def check_supported(requests: Iterable[Request], workers: Iterable[WorkerStatus], *, has_tools: bool = False) -> None:
    """Raise `ApiError` 400 if a request has a parameter that a live worker cannot honour: any may claim the request.

    `has_tools` says whether the model is told of tools.
    """
    unsupported = unsupported_by(workers)
    if not unsupported:
        return
    for request in requests:
        options = options_of(request.sampling)
        if request.chat:
            beside = {f"{IMAGES}+{name}" for name in (*options, *(("tools",) if has_tools else ()))}
            options = options | beside | {IMAGES}
        for found in sorted(options & unsupported):
            name = found.removeprefix(f"{IMAGES}+")
            param = _PARAMS.get(name, name)
            what = _WHAT.get(name, "it")
            where = " in a chat with images" if name != found else ""
            reason = f"the server that generates the tokens cannot do {what}{where}. Leave it out."
            raise invalid_value(param, f"Invalid value for '{param}': {reason}")
