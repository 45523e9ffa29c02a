"""The endpoints GET /v1/models and /v1/models/{id}: the names of the model that this server serves."""

from typing import Any

from fastapi import APIRouter, Request

from gateway.protocol.errors import model_not_found
from gateway.routes.dependencies import Caller
from gateway.state import Gateway, gateway_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request, key: Caller) -> dict[str, Any]:
    gateway = gateway_of(request)
    return {"object": "list", "data": [_model(gateway, name) for name in gateway.model_names]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str, key: Caller) -> dict[str, Any]:
    gateway = gateway_of(request)
    if model not in gateway.model_names:
        raise model_not_found(model)
    return _model(gateway, model)


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": gateway.created, "owned_by": "tidegate"}
