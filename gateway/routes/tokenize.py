"""POST /tokenize and /detokenize: the tokens of a text or a conversation, and the text of tokens, as vLLM has them.
GET /tokenizer_info: the tokenizer's configuration.

A body of /tokenize is a body of one of the two completion endpoints, without what is needed only to generate. So its
tokens are exactly the prompt that this endpoint would compute.
"""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from gateway.identity import resolve_tier
from gateway.protocol.bodies.messages import Text
from gateway.protocol.bodies.schemas import (
    MAX_PROMPT_IDS,
    AnyRequest,
    ChatCompletionRequest,
    CompletionRequest,
    parse_generation,
)
from gateway.protocol.errors import invalid_value, model_not_found
from gateway.protocol.json_body import Body, hold_object, parse
from gateway.protocol.openapi import json_body
from gateway.requests.prepare.images import image_places
from gateway.routes.chat import choose_model, json_response
from gateway.routes.dependencies import Caller
from gateway.state import gateway_of

router = APIRouter(tags=["models"])


class TokenizeRequest(Body):
    """The fields of /tokenize itself. All other fields of the completion endpoints have their meaning here too."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Any] | None = None  # validated as the messages of a chat completion
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request, key: Caller) -> Response:
    """Return the token ids of `prompt`, or of the prompt that the chat template makes of `messages`."""
    gateway = gateway_of(request)
    async with hold_object(request, partial(_parse_tokenize, gateway.models.names)) as (body, with_strings):
        served, body = choose_model(request, body, key)
        for place in image_places(body):
            raise invalid_value(place, f"Invalid value for '{place}': only the model's server knows an image's tokens.")
        tier = resolve_tier(None, key, served.tiers).tier
        ids = await served.completions.encode(body, tier, key.name if key else None)
    strings = await served.model.tokenizer.token_strings(ids) if with_strings else None
    context = served.completions.limits().max_model_len
    return json_response({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": strings})


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request, key: Caller) -> Response:
    """Return the text of `tokens`, with special tokens."""
    gateway = gateway_of(request)
    async with hold_object(request, partial(_parse_detokenize, gateway.models.names)) as body:
        served, body = choose_model(request, body, key)
        vocab_size = served.completions.limits().vocab_size
        if max(body.tokens, default=0) >= vocab_size:
            raise invalid_value("tokens", f"Invalid value for 'tokens': token ids must be less than {vocab_size}.")
        return json_response({"prompt": await served.model.tokenizer.decode(body.tokens)})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, key: Caller, model: str | None = None) -> Response:
    """Return what the model's files say of its tokenizer, with the chat template. Without `model`: of the main one."""
    models = gateway_of(request).models
    _check_model(models.names, model)
    return json_response(models.of(model).model.tokenizer.config)


def _parse_tokenize(model_names: tuple[str, ...], body: dict[str, Any]) -> tuple[AnyRequest, bool]:
    """Return the request of a completion endpoint with the same prompt, and whether texts of tokens are wanted."""
    options = parse(TokenizeRequest, body)
    if (options.prompt is None) == (options.messages is None):
        raise invalid_value("prompt", "Either 'prompt' or 'messages' is needed, and not both.")
    _check_model(model_names, options.model)
    kind: type[AnyRequest] = CompletionRequest if options.messages is None else ChatCompletionRequest
    rest = {name: value for name, value in body.items() if name != "return_token_strs"}
    return parse_generation(kind, {**rest, "model": options.model or model_names[0]}), options.return_token_strs


def _parse_detokenize(model_names: tuple[str, ...], body: dict[str, Any]) -> DetokenizeRequest:
    options = parse(DetokenizeRequest, body)
    _check_model(model_names, options.model)
    return options.model_copy(update={"model": options.model or model_names[0]})


def _check_model(model_names: tuple[str, ...], model: str | None) -> None:
    if model is not None and model not in model_names:
        raise model_not_found(model)
