"""The endpoints GET /v1/models and /v1/models/{id}: the names, limits and capabilities of the model that is served.

Beside OpenAI's fields, a model has those that clients of vLLM (`max_model_len`, `root`, `parent`, `permission`),
OpenRouter (`context_length`) and Mistral (`capabilities`) read. Both endpoints also answer HEAD, without a body.
"""

from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from gateway.protocol.errors import model_not_found
from gateway.routes.dependencies import Caller
from gateway.state import Gateway, gateway_of

router = APIRouter(tags=["models"])


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request, key: Caller) -> dict[str, Any]:
    gateway = gateway_of(request)
    return {"object": "list", "data": [_model(gateway, name) for name in gateway.model.names]}


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str, key: Caller) -> dict[str, Any]:
    gateway = gateway_of(request)
    if not model:
        raise HTTPException(404)  # /v1/models/: its answer names /v1/models
    if model not in gateway.model.names:
        raise model_not_found(model)
    return _model(gateway, model)


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the object of one name. `root` is the main name of the model, for which the other names are aliases."""
    tokenizer = gateway.model.tokenizer
    context = gateway.completions.limits().max_model_len
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "tidegate",
        "root": gateway.model.names[0],
        "parent": None,
        "max_model_len": context,
        "context_length": context,
        "capabilities": {
            "completion": True,
            "completion_chat": bool(tokenizer.chat_template),
            "function_calling": "tools" in tokenizer.chat_template,
            "fine_tuning": False,
            "vision": False,
        },
        "permission": [_permission(name, gateway.created)],
    }


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
