"""The FastAPI application of one `Gateway`: routes, error handlers, middleware, startup and shutdown."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from gateway.http.draining import RefuseWhileDraining
from gateway.http.middleware import BodyLimit, RequestContext
from gateway.protocol import errors
from gateway.routes import admin, batches, chat, files, models, ops
from gateway.routes.dependencies import authenticated
from gateway.routes.sla_feed import SlaFeed
from gateway.state import Gateway


def create_app(gateway: Gateway) -> FastAPI:
    app = FastAPI(
        title="Tidegate",
        description="An OpenAI-compatible gateway: interactive and bulk LLM traffic on one GPU.",
        version=_version(),
        lifespan=_lifespan,
        redirect_slashes=False,
        middleware=[  # from the outermost to the innermost
            Middleware(RequestContext, metrics=gateway.metrics, clock=gateway.clock),
            Middleware(RefuseWhileDraining, is_draining=lambda: gateway.client.is_draining),
            Middleware(BodyLimit, max_bytes=gateway.max_body_bytes, exempt="/v1/files"),
        ],
    )
    app.state.gateway = gateway
    app.state.sla_feed = SlaFeed(gateway.client, gateway.clock)
    app.include_router(ops.router)
    app.include_router(admin.router)
    for routes in (chat, models):
        app.include_router(routes.router)
    for routes in (files, batches):
        app.include_router(routes.router, dependencies=[Depends(authenticated)])
    parts = (ops, admin, chat, models, files, batches)
    errors.install(app, [route for part in parts for route in part.router.routes])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the tier follower, the client and the batch service, which needs the client. Stop them in reverse order."""
    gateway: Gateway = app.state.gateway
    async with AsyncExitStack() as stack:
        if gateway.tier_changes is not None:
            await stack.enter_async_context(gateway.tier_changes.follower)
        await gateway.client.start()
        stack.push_async_callback(gateway.client.close)
        stack.callback(gateway.client.drain)
        if gateway.batches is not None:
            await gateway.batches.start()
            stack.push_async_callback(gateway.batches.close)
        yield


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
