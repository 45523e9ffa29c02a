"""GET /health, /ready, /metrics and /: for load balancers, Prometheus and the curious. No key needed.

Load balancers may ask by HEAD; the server leaves the body out.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.ops import exposition, readiness
from gateway.state import gateway_of

router = APIRouter(tags=["operations"])


@router.get("/")
async def root(request: Request) -> dict[str, Any]:
    names = list(gateway_of(request).model_names)
    return {"name": "tidegate", "models": names, "api": "/v1", "docs": "/docs", "metrics": "/metrics"}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """The process lives; nothing more."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while requests can be served, else 503 with what is missing."""
    is_ready, report = await readiness(gateway_of(request).client)
    return JSONResponse(report, status_code=200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await exposition(gateway_of(request)), media_type=CONTENT_TYPE_LATEST)
