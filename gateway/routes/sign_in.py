"""The console's way in and out by OpenID Connect. Without settings for it, only `/console/session` is there."""

from typing import Any

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from gateway.http.access.sign_in import SESSION_S, SignIn
from gateway.protocol.errors import ApiError
from gateway.routes.dependencies import session_user
from gateway.state import gateway_of

log = structlog.get_logger(__name__)

router = APIRouter(include_in_schema=False)


@router.get("/console/session")
async def read_session(request: Request) -> dict[str, Any]:
    """Say whether one can sign in here, and who has."""
    user = session_user(request)
    known = {} if user is None else request.session["user"]
    return {"sign_in": gateway_of(request).sign_in is not None, "user": known.get("name"), "role": known.get("role")}


@router.get("/console/sign-in")
async def sign_in(request: Request) -> Response:
    """Send the browser to the provider."""
    provider = _sign_in_of(request).provider
    back = request.url_for("come_back")
    for begun in [name for name in request.session if name != "user"]:  # earlier ones, or the cookie would grow
        del request.session[begun]
    try:
        response: Response = await provider.authorize_redirect(request, back)
    except Exception as error:  # of httpx, or what a wrong document makes of Authlib
        log.warning("the provider of sign-ins cannot be used", error=repr(error))
        raise ApiError(
            502, "The provider of sign-ins cannot be reached.", "server_error", code="sign_in_failed"
        ) from None
    return response


@router.get("/console/callback")
async def come_back(request: Request) -> Response:
    """Take the user whom the provider sends back, and give the browser a session of its own."""
    own = _sign_in_of(request)
    try:
        claims = await own.claims(request)
    except Exception as error:  # of Authlib, joserfc or httpx: none of them says anything to the user
        log.warning("a sign-in failed", error=repr(error))
        message = "Signing in has failed. Try again from the console; the server's log says why."
        raise ApiError(403, message, code="sign_in_failed") from None
    role, name = own.role_of(claims), str(claims.get("email") or claims.get("preferred_username") or claims["sub"])
    if role is None:
        message = f"{name[:200]} has no role on this server: no rule of --oidc-roles fits."
        raise ApiError(403, message, code="insufficient_permissions")
    request.session.clear()
    until_ms = gateway_of(request).clock.wall_ms() + 1000 * SESSION_S
    request.session["user"] = {"sub": claims["sub"], "name": name, "role": role, "until_ms": until_ms}
    address = request.client.host if request.client is not None else None
    await gateway_of(request).audit.add("console.sign_in", f"{name} as {role}", f"oidc:{claims['sub']}", address)
    return RedirectResponse("../", 303)


@router.post("/console/sign-out")
async def sign_out(request: Request) -> dict[str, Any]:
    """End the session in this browser. Pages of other origins cannot: `session_user` refuses them."""
    _sign_in_of(request)
    session_user(request)
    request.session.clear()
    return {"user": None}


def _sign_in_of(request: Request) -> SignIn:
    own = gateway_of(request).sign_in
    if own is None:
        raise ApiError(404, "Signing in is not configured on this server.")
    return own
