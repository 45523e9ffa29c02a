"""The FastAPI application of one `Gateway`: routes, error handlers, middleware, startup and shutdown."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware

from gateway.fairness import UnderWay
from gateway.http.access.cors import Cors
from gateway.http.access.host_check import HostCheck
from gateway.http.access.sign_in import Sessions
from gateway.http.download import MAX_DOWNLOADS, MAX_DOWNLOADS_OF_KEY
from gateway.http.middleware import BodyLimit, OneAtATime, RequestContext
from gateway.http.server.draining import RefuseWhileDraining
from gateway.protocol import error_handlers
from gateway.protocol.json_body import MAX_BODIES, BodyReader
from gateway.protocol.openapi import described
from gateway.routes import chat, conversations, messages, models, ops, pages, responses, sign_in, tokenize, vectors
from gateway.routes.dependencies import Reader, WrongKeys, authenticated, request_counted
from gateway.routes.direct import DirectEndpoints
from gateway.routes.jobs import batches, files, message_batches, tasks, uploads
from gateway.routes.operators import admin, audit, dead_letters, keys, overview, scale, usage
from gateway.routes.operators.sla_feed import SlaFeed
from gateway.state import Gateway
from scheduler.store.errors import STORE_AWAY

NOT_ADMIN: dict[int | str, dict[str, Any]] = {403: {"description": "The key has not the role that this needs."}}
UPLOAD_PATHS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts$")  # their bodies go to the disk as they come

# The endpoints that generate answers. Their functions take a request and its caller's key.
ENDPOINTS = (
    *(chat.create_chat_completion, chat.create_completion, messages.create_message, responses.create_response),
    *(vectors.create_embeddings, vectors.rerank),
)
DIRECT = [
    route
    for part in (chat, messages, responses, vectors)
    for route in part.router.routes
    if isinstance(route, APIRoute) and route.endpoint in ENDPOINTS
]


def create_app(gateway: Gateway) -> FastAPI:
    app = FastAPI(
        title="Tidegate",
        description="An OpenAI-compatible gateway: interactive and bulk LLM traffic on one GPU.",
        version=_version(),
        lifespan=_lifespan,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        openapi_url=None,  # FastAPI writes the document anew for each request, on the event loop
        docs_url=None,  # its page loads its scripts from a CDN
        redoc_url=None,
        middleware=[  # from the outermost to the innermost
            Middleware(Cors, allowed=gateway.allowed_origins),
            Middleware(RequestContext, metrics=gateway.metrics, clock=gateway.clock),
            Middleware(OneAtATime, keyring=gateway.keyring),
            *([Middleware(gateway.tracing)] if gateway.tracing is not None else []),
            Middleware(HostCheck, allowed=gateway.allowed_hosts, is_open=lambda: gateway.keyring.is_open),
            Middleware(RefuseWhileDraining, is_draining=lambda: gateway.is_draining),
            *([] if gateway.sign_in is None else [Middleware(Sessions, secret=gateway.sign_in.cookie_secret)]),
            Middleware(BodyLimit, max_bytes=gateway.max_body_bytes, exempt=UPLOAD_PATHS),
            Middleware(DirectEndpoints, routes=DIRECT),
        ],
    )
    app.state.gateway = gateway
    app.state.body_reader = BodyReader(MAX_BODIES * gateway.max_body_bytes)
    app.state.description = ops.Shared(partial(asyncio.to_thread, described, app, gateway.models.names), gateway.clock)
    app.state.metrics_page = ops.Shared(partial(ops.exposition, gateway), gateway.clock, ops.METRICS_PERIOD_S)
    app.state.wrong_keys = WrongKeys()
    app.state.downloads = UnderWay(MAX_DOWNLOADS, MAX_DOWNLOADS_OF_KEY)
    app.state.sla_feeds = {served.name: SlaFeed(served.client, gateway.clock) for served in gateway.models}
    if gateway.console:
        app.include_router(sign_in.router)  # before the next one, which answers all of /console
        app.include_router(pages.console)  # before the next one, which also answers `/`
    app.include_router(ops.router)
    if not gateway.private_docs:
        app.include_router(pages.docs)
    for routes in (admin, audit, overview, scale, keys, usage, dead_letters):
        app.include_router(routes.router, tags=["admin"], dependencies=[Reader], responses=NOT_ADMIN)
    for routes in (chat, messages, models, tokenize, vectors):
        app.include_router(routes.router)
    app.include_router(responses.router, dependencies=[Depends(authenticated)])
    for routes in (files, uploads, batches, message_batches, tasks, conversations):
        app.include_router(routes.router, dependencies=[Depends(authenticated), Depends(request_counted)])
    parts = (
        *(ops, admin, audit, overview, scale, keys, usage, dead_letters, chat, messages, models, tokenize, vectors),
        *(files, uploads, batches, message_batches, tasks, responses, conversations),
    )
    error_handlers.install(app, [route for part in parts for route in part.router.routes])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the tier followers, the clients and the batch service, which needs the clients. Stop them in reverse order.

    Usage is written a last time after the requests that it counts have ended.
    """
    gateway: Gateway = app.state.gateway
    async with AsyncExitStack() as stack:
        for served in gateway.models:
            await stack.enter_async_context(served.tier_changes.follower)
        with suppress(*STORE_AWAY):  # it is read again a second later
            await gateway.key_source.follow_store()
        stack.push_async_callback(gateway.usage.try_flush)
        await stack.enter_async_context(_running(gateway))
        for client in gateway.clients:
            await client.start()
            stack.push_async_callback(client.close)
        stack.callback(gateway.drain)
        await gateway.batches.start()
        stack.push_async_callback(gateway.batches.close)
        stack.push_async_callback(gateway.tasks.close)
        stack.push_async_callback(gateway.responses.close)
        yield


@asynccontextmanager
async def _running(gateway: Gateway) -> AsyncIterator[None]:
    """Run what looks after keys, limits, usage, uploads, webhooks and responses every few seconds, within the block.

    A tiers file that is newer than the tiers in force is offered to all parts first.
    """
    work = (
        gateway.key_source.follow(),
        gateway.limits.renew(),
        gateway.usage.follow(),
        gateway.uploads.follow(),
        gateway.webhooks.follow(),
        gateway.responses.watch(),
        *(served.tier_changes.offer_file() for served in gateway.models),
    )
    tasks = [asyncio.create_task(part) for part in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@cache
def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
