"""FastAPI dependencies of the routes: identify the caller, and check who may use /admin, before a body is read.

If API keys are configured, a request needs one of them, and /admin needs a key with a role. A user who is signed in to
the console counts as such a key.

If no keys are configured, /v1 is open to every program that can reach the port, but not to web pages of other origins,
unless `--allowed-origins` names them. Such pages must be refused, because a browser lets every page post text/plain or
a form to 127.0.0.1. Browsers send the page's origin in the `Origin` header, or at least `Sec-Fetch-Site` where a page
only loads an image or follows a link; other programs send neither. The server compares `Origin` with `Host`, so a proxy
has to pass on `Host` as the client wrote it.

Without keys, /admin is open only to programs on this machine. The client's address must be a loopback address, and the
host name in the request must be `localhost` or a loopback address. The check of the host name keeps out web pages whose
host name was made to resolve to 127.0.0.1 (DNS rebinding). A request that a proxy on this machine has passed on is not
local, even if the proxy has written another host name into it. Pages of other origins may not use /admin without a key,
whatever `--allowed-origins` says.
"""

from collections import OrderedDict
from typing import Annotated
from urllib.parse import urlsplit

import structlog
from fastapi import Depends, Request

from gateway.http.access.hosts import address_of, host_name
from gateway.identity import ApiKey, authorization_of
from gateway.protocol.errors import ApiError, foreign_origin
from gateway.state import gateway_of

# The headers that proxies add. nginx adds none unless it is told to, but by default it speaks HTTP/1.0 to servers.
PROXY_HEADERS = frozenset(
    ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-server", "x-real-ip")
)
SAFE = ("GET", "HEAD")  # methods that change nothing
FREE = 10  # wrong keys of one address in a row that are refused at once
PERIOD_S = 1.0  # seconds between the refusals of further ones; also after how long one of the free ones is free again
MAX_DELAY_S = 30.0  # more would only keep connections open
MAX_ADDRESSES = 4096  # the addresses that were quiet for longest are forgotten first


class WrongKeys:
    """How long the refusal of a wrong API key is delayed, by the address that sent it.

    A right key is never delayed, so that nobody is locked out who shares an address with an attacker.
    """

    def __init__(self) -> None:
        self._paid_until_s: OrderedDict[str, float] = OrderedDict()

    def delay_s(self, address: str, now: float) -> float:
        """Count a wrong key, and return how many seconds its refusal has to wait."""
        paid_until_s = max(self._paid_until_s.pop(address, now), now) + PERIOD_S
        self._paid_until_s[address] = min(paid_until_s, now + FREE * PERIOD_S + MAX_DELAY_S)
        if len(self._paid_until_s) > MAX_ADDRESSES:
            self._paid_until_s.popitem(last=False)
        return max(0.0, self._paid_until_s[address] - now - FREE * PERIOD_S)


async def authenticated(request: Request) -> ApiKey | None:
    """Return the caller's key, or the user who is signed in; None if no keys are configured.

    Raises `ApiError` 401 if the caller's key is missing or wrong. Raises `ApiError` 403 if no keys are configured and a
    web page of an origin that is not allowed sent the request.
    """
    gateway = gateway_of(request)
    if gateway.keyring.is_open and (origin := _other_origin(request)) and not gateway.allowed_origins.allows(origin):
        raise foreign_origin(origin)
    try:
        key = _key_of(request)
    except ApiError as error:
        if error.status != 401:
            raise
        await _slow_down(request)
        raise
    if key is not None:
        structlog.contextvars.bind_contextvars(key=key.name)
        request.state.key_name = key.name
    return key


def _key_of(request: Request) -> ApiKey | None:
    """Return the caller's key, or the user who is signed in; None if no keys are configured. Raises `ApiError`."""
    authorization = authorization_of(request.headers)
    user = session_user(request) if authorization is None else None
    return user or gateway_of(request).keyring.authenticate(authorization)


def session_user(request: Request) -> ApiKey | None:
    """Return the user who is signed in to the console, as a key without limits; None if there is none.

    A browser sends the cookie of the session with requests that other pages make, too. So `ApiError` 403 is raised if
    the request is of a page of another origin; and if it changes something, also if the browser does not say that it is
    of a page of this server.
    """
    user = request.session.get("user") if "session" in request.scope else None
    # The cookie has an age, too, but is younger each time that it is written.
    if user is None or gateway_of(request).clock.wall_ms() >= user.get("until_ms", 0):
        return None
    origin = _other_origin(request)
    is_told = "origin" in request.headers or request.headers.get("sec-fetch-site") == "same-origin"
    if origin is not None or not (is_told or request.method in SAFE):
        raise foreign_origin(origin or "null", with_session=True)
    return ApiKey(f"oidc:{user['sub']}", b"", role=user["role"])


Caller = Annotated[ApiKey | None, Depends(authenticated)]


async def request_counted(request: Request, key: Caller) -> None:
    """Count a request that generates nothing by the limits of requests of the caller's key and its project.

    Raises `ApiError` 429 if the limit is reached.
    """
    if key is not None and any(holder.requests_per_minute is not None for holder in key.holders):
        request.state.headers = (await gateway_of(request).limits.reserve(key, tokens=0)).headers


def _check_role(request: Request, key: ApiKey | None, role: str) -> None:
    """Check that the caller may do with /admin what needs this role. Raises `ApiError` 403 if not."""
    if key is not None and not key.may(role):
        needed = "`admin: true`" if role == "admin" else f"`role: {role}` or `admin: true`"
        message = f"This API key may not do this: that takes {needed} in the keys file."
        raise ApiError(403, message, code="insufficient_permissions")
    if key is None and (_other_origin(request) or not _is_local(request)):
        message = "Without API keys, administration is open to programs on the server's own machine only."
        raise ApiError(403, message, code="insufficient_permissions")


async def reader(request: Request, key: Caller) -> None:
    _check_role(request, key, "read")


def is_reader(request: Request) -> bool:
    """Return whether who sent the request may still read /admin: keys are revoked, and sessions end."""
    try:
        _check_role(request, _key_of(request), "read")
    except ApiError:
        return False
    return True


async def operator(request: Request, key: Caller) -> None:
    _check_role(request, key, "operate")


async def administrator(request: Request, key: Caller) -> None:
    _check_role(request, key, "admin")


Reader, Operator, Administrator = Depends(reader), Depends(operator), Depends(administrator)


def _other_origin(request: Request) -> str | None:
    """Return the origin of the web page of another origin that sent the request; None if no such page did.

    It is `null` for sandboxed pages, and where the browser does not tell the origin.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return "null" if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") else None
    try:
        is_own = urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    except ValueError:
        is_own = False
    return None if is_own else origin


def _is_local(request: Request) -> bool:
    if PROXY_HEADERS & set(request.headers) or request.scope["http_version"] == "1.0":
        return False
    if request.client is None or not _is_loopback(request.client.host):
        return False
    name = host_name(request.headers.get("host", ""))
    return name == "localhost" or _is_loopback(name)


async def _slow_down(request: Request) -> None:
    """Wait before a wrong key is refused, if its address has sent many."""
    wrong_keys: WrongKeys = request.app.state.wrong_keys
    clock = gateway_of(request).clock
    address = request.client.host if request.client is not None else ""
    if delay_s := wrong_keys.delay_s(address, clock.now()):
        structlog.contextvars.bind_contextvars(delayed_s=round(delay_s, 1))
        await clock.sleep(delay_s)


def _is_loopback(host: str) -> bool:
    address = address_of(host)
    return address is not None and address.is_loopback
