"""The endpoints GET /v1/models and /v1/models/{id}: the names, limits and capabilities of the models that are served.

Beside OpenAI's fields, a model has those that clients of vLLM (`max_model_len`, `root`, `parent`, `permission`),
OpenRouter (`context_length`) and Mistral (`capabilities`) read. Anthropic's clients get the objects of its API. Both
endpoints also answer HEAD, without a body.
"""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from gateway.models import ServedModel
from gateway.protocol.error_shapes import speaks_anthropic
from gateway.protocol.errors import model_not_found
from gateway.requests.prepare.routing import listed_models, served_model
from gateway.routes.dependencies import Caller
from gateway.state import Gateway, gateway_of

router = APIRouter(tags=["models"])

YES, NO = {"supported": True}, {"supported": False}


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request, key: Caller) -> dict[str, Any]:
    gateway = gateway_of(request)
    names = listed_models(gateway.tiers.routing, gateway.models.names)
    if speaks_anthropic(request.scope):
        ends = {"first_id": names[0], "last_id": names[-1]}
        return {"data": [_anthropic_model(gateway, name) for name in names], "has_more": False, **ends}
    return {"object": "list", "data": [_model(gateway, name) for name in names]}


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str, key: Caller) -> dict[str, Any]:
    gateway = gateway_of(request)
    if not model:
        raise HTTPException(404)  # /v1/models/: its answer names /v1/models
    if model not in listed_models(gateway.tiers.routing, gateway.models.names):
        raise model_not_found(model)
    return _anthropic_model(gateway, model) if speaks_anthropic(request.scope) else _model(gateway, model)


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the object of one name. `root` is the main name of the model, for which the other names are aliases."""
    served = _served(gateway, name)
    tokenizer, is_chat = served.model.tokenizer, served.model.kind == "chat"
    context = served.completions.limits().max_model_len
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "tidegate",
        "root": served.name,
        "parent": None,
        "max_model_len": context,
        "context_length": context,
        "capabilities": {
            "completion": is_chat,
            "completion_chat": is_chat and bool(tokenizer.chat_template),
            "function_calling": is_chat and "tools" in tokenizer.chat_template,
            "embedding": served.model.kind == "embedding",
            "rerank": served.model.kind == "rerank",
            "fine_tuning": False,
            "vision": served.model.image_tokens > 0,
        },
        "permission": [_permission(name, gateway.created)],
    }


def _anthropic_model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the object of one name as Anthropic's API has it. Its clients read the limits and the capabilities."""
    served = _served(gateway, name)
    context = served.completions.limits().max_model_len
    reasons = {"supported": served.model.format.reasoning is not None}
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(gateway.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": {
            **{name: NO for name in ("citations", "code_execution", "context_management", "pdf_input")},
            "image_input": {"supported": served.model.image_tokens > 0},
            "batch": YES,
            "structured_outputs": YES,
            "server_tools": {**NO, "code_execution": NO, "web_search": NO},
            "effort": {**reasons, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), reasons)},
            "thinking": {
                **reasons,
                "types": {**dict.fromkeys(("adaptive", "enabled", "between_tools"), reasons), "disabled": YES},
            },
        },
    }


def _served(gateway: Gateway, name: str) -> ServedModel:
    """Return the model of a listed name, which may have the suffix of a routing rule."""
    return gateway.models.of(served_model(gateway.tiers.routing, name, gateway.models.names))


def _permission(name: str, created: int) -> dict[str, Any]:
    """Return what any caller may do with the model, in the form that OpenAI's API had and vLLM still has."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
