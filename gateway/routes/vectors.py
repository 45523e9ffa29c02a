"""POST /v1/embeddings and POST /v1/rerank: the vectors of texts, and documents by their relevance to a query."""

from fastapi import APIRouter, Request, Response

from gateway.protocol.bodies.vectors import EmbeddingRequest, RerankRequest
from gateway.protocol.openapi import json_body
from gateway.routes.chat import deliver
from gateway.routes.dependencies import Caller

router = APIRouter(tags=["vectors"])


@router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingRequest))
async def create_embeddings(request: Request, key: Caller) -> Response:
    """Return the embedding of each input, as numbers or in base64."""
    return await deliver(request, "/v1/embeddings", key)


@router.post("/v1/rerank", openapi_extra=json_body(RerankRequest))
async def rerank(request: Request, key: Caller) -> Response:
    """Return the documents with their relevance to the query, the most relevant one first."""
    return await deliver(request, "/v1/rerank", key)
