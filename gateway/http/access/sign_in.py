"""Signing in to the console by OpenID Connect: the provider, who gets which role, and the cookie that remembers it.

Authlib speaks with the provider (authorization code flow with PKCE, state and nonce, checked signatures), and Starlette
signs the cookie. Both are imported only where signing in is configured. Does not know routes or API keys.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.identity import ROLES

SESSION_S = 8 * 3600  # how long somebody stays signed in: a working day
COOKIE = "tidegate"


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Users whose claim is, or contains, this value have the role."""

    claim: str
    value: str
    role: str

    @staticmethod
    def parse(text: str) -> "RoleRule":
        """Return the rule that `CLAIM=VALUE:ROLE` means. Raises `ValueError` if it means none."""
        condition, _, role = text.rpartition(":")
        claim, _, value = condition.partition("=")
        if not claim or not value or role not in ROLES:
            raise ValueError(f"{text!r} must be CLAIM=VALUE:ROLE, with a role of {', '.join(ROLES)}")
        return RoleRule(claim, value, role)

    def fits(self, claims: Mapping[str, Any]) -> bool:
        """Whether the claims fit. An address that the provider has not verified is nobody's."""
        if self.claim == "email" and claims.get("email_verified") is not True:
            return False
        found = claims.get(self.claim)
        return self.value in found if isinstance(found, list) else found == self.value


@dataclass(frozen=True)
class SignIn:
    """The provider and its client, as the settings name them."""

    issuer: str
    client_id: str
    client_secret: str
    scopes: str
    rules: Sequence[RoleRule]

    def role_of(self, claims: Mapping[str, Any]) -> str | None:
        """Return the highest role that a rule gives to a user with these claims; None: the user may not sign in."""
        roles = [rule.role for rule in self.rules if rule.fits(claims)]
        return max(roles, key=ROLES.index, default=None)

    @property
    def cookie_secret(self) -> str:
        """The secret that signs cookies. All gateways have the same one."""
        return hmac.new(self.client_secret.encode(), b"tidegate session", hashlib.sha256).hexdigest()

    @cached_property
    def provider(self) -> Any:
        """Authlib's client of the provider, which reads the provider's metadata when it is used."""
        from authlib.integrations.starlette_client import OAuth

        return OAuth().register(
            "provider",
            client_id=self.client_id,
            client_secret=self.client_secret,
            server_metadata_url=f"{self.issuer.rstrip('/')}/.well-known/openid-configuration",
            client_kwargs={"scope": self.scopes, "code_challenge_method": "S256"},
        )

    async def claims(self, request: Any) -> Mapping[str, Any]:
        """Return the claims of the user whom the provider has sent back with `request`.

        Raises Authlib's and joserfc's errors, and those of httpx.
        """
        trusted = {"iss": {"essential": True, "values": [self.issuer]}}
        token = await self.provider.authorize_access_token(request, claims_options=trusted)
        claims: Mapping[str, Any] = token["userinfo"]
        return claims


class Sessions:
    """The middleware that keeps `request.session` in a signed cookie. One that is set over HTTPS is sent there only."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        from starlette.middleware.sessions import SessionMiddleware

        self._plain = SessionMiddleware(app, secret, COOKIE, SESSION_S)
        self._secure = SessionMiddleware(app, secret, f"__Host-{COOKIE}", SESSION_S, https_only=True)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["scheme"] == "https":
            await self._secure(scope, receive, send)
        else:
            await self._plain(scope, receive, send)
