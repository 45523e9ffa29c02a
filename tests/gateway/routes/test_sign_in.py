"""Signing in to the console by OpenID Connect, with a real provider on this machine."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import structlog
from pydantic import SecretStr, ValidationError
from redis.asyncio import Redis

from gateway.http.access.sign_in import COOKIE, SESSION_S, RoleRule, SignIn
from tests.gateway.offline import ShiftedClock
from tests.gateway.protocol.test_errors import CHAT, error_of
from tests.gateway.stand import URL, Stand, running_stand
from tidegate.settings.gateway import GatewaySettings

mock = pytest.importorskip("oidc_provider_mock", reason="signing in needs tidegate[oidc]")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the provider's, of Authlib's older names

OWN = {"origin": URL}
CLAIMS: dict[str, dict[str, Any]] = {
    "ada": {"email": "ada@example.com", "email_verified": True, "groups": ["staff", "sre"]},
    "bob": {"email": "bob@example.com", "email_verified": True, "groups": ["staff"]},
    "eve": {"email": "ada@example.com", "email_verified": False, "groups": "sre, staff"},
}


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    users = [mock.User(sub=sub, claims=claims) for sub, claims in CLAIMS.items()]
    with mock.run_server_in_thread(require_nonce=True, user_claims=users) as server:
        yield f"http://localhost:{server.server_port}"


@asynccontextmanager
async def console(redis: Redis, issuer: str, **options: Any) -> AsyncIterator[Stand]:
    settings: dict[str, Any] = {
        "api_key": SecretStr("sk-operator"),
        "oidc_issuer": issuer,
        "oidc_client_id": "tidegate",
        "oidc_client_secret": SecretStr("a secret"),
        "oidc_roles": ["groups=sre:admin", "groups=staff:read", "email=ada@example.com:operate"],
    }
    async with running_stand(redis=redis, **settings | options) as stand:
        stand.http.cookies = httpx.Cookies()
        yield stand


async def go_to_provider(stand: Stand) -> str:
    answer = await stand.http.get("/console/sign-in")
    assert answer.status_code == 302
    return answer.headers["location"]


async def come_back(stand: Stand, location: str, sub: str) -> httpx.Response:
    """Sign in at the provider, which sends the browser back, and follow it."""
    async with httpx.AsyncClient(verify=False) as browser:
        consent = await browser.post(location, data={"sub": sub})
        assert consent.status_code == 302, consent.text
    return await stand.http.get(consent.headers["location"])


async def sign_in(stand: Stand, sub: str) -> httpx.Response:
    return await come_back(stand, await go_to_provider(stand), sub)


async def session(stand: Stand) -> dict[str, Any]:
    found: dict[str, Any] = (await stand.http.get("/console/session")).json()
    return found


async def test_a_user_signs_in_looks_changes_and_signs_out(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        assert await session(stand) == {"sign_in": True, "user": None, "role": None}
        assert (await stand.http.get("/admin/keys")).status_code == 401
        back = await sign_in(stand, "ada")
        assert (back.status_code, back.headers["location"]) == (303, "../")
        assert await session(stand) == {"sign_in": True, "user": "ada@example.com", "role": "admin"}
        assert (await stand.post("/admin/keys", {"name": "new"}, headers=OWN)).status_code == 200
        assert (await stand.post("/v1/chat/completions", CHAT, headers=OWN)).status_code == 200
        log = (await stand.http.get("/admin/audit")).json()["data"]
        [row] = (await stand.http.get("/admin/usage")).json()["total"]
        left = await stand.http.post("/console/sign-out", headers=OWN)
        assert left.status_code == 200
        assert (await session(stand))["user"] is None
        assert (await stand.http.get("/admin/keys")).status_code == 401
    assert [(entry["action"], entry["key"]) for entry in log] == [
        ("key.create", "oidc:ada"),
        ("console.sign_in", "oidc:ada"),
    ]
    assert log[1]["subject"] == "ada@example.com as admin"
    assert row["key"] == "oidc:ada"


async def test_the_role_is_that_of_the_claims_and_nobody_else_signs_in(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        await sign_in(stand, "bob")
        assert (await session(stand))["role"] == "read"
        assert (await stand.http.get("/admin/keys")).status_code == 200
        assert error_of(await stand.post("/admin/keys", {"name": "n"}, headers=OWN), 403)["code"] == (
            "insufficient_permissions"
        )
    async with console(redis_client, issuer) as stand:
        refused = error_of(await sign_in(stand, "eve"), 403)
        assert "no role on this server" in refused["message"]
        assert (await session(stand))["user"] is None


async def test_the_cookie_is_signed_and_no_script_reads_it(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        made = SimpleCookie((await sign_in(stand, "bob")).headers["set-cookie"])[COOKIE]
        assert (made["httponly"], made["samesite"], made["path"]) == (True, "lax", "/")
        assert (made["max-age"], made["secure"]) == (str(SESSION_S), "")
        payload, _, signature = made.value.partition(".")
        stand.http.cookies = httpx.Cookies({COOKIE: f"{payload[:-4]}AAAA.{signature}"})
        assert (await stand.http.get("/admin/keys")).status_code == 401
        other = {"oidc_client_secret": SecretStr("another secret")}
        async with console(redis_client, issuer, **other) as elsewhere:
            elsewhere.http.cookies = httpx.Cookies({COOKIE: made.value})
            assert (await elsewhere.http.get("/admin/keys")).status_code == 401
        async with console(redis_client, issuer) as beside:
            beside.http.cookies = httpx.Cookies({COOKIE: made.value})
            assert (await beside.http.get("/admin/keys")).status_code == 200, "gateways share sessions"


async def test_over_https_the_cookie_never_leaves_it(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        answer = await stand.http.get("https://127.0.0.1:8000/console/sign-in")
        cookie = SimpleCookie(answer.headers["set-cookie"])[f"__Host-{COOKIE}"]
        back = parse_qs(urlsplit(answer.headers["location"]).query)["redirect_uri"]
    assert (cookie["secure"], cookie["httponly"], cookie["path"], cookie["domain"]) == (True, True, "/", "")
    assert back == ["https://127.0.0.1:8000/console/callback"]


FORGED: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", [*FORGED, {}], ids=str)
async def test_no_other_page_uses_the_session(redis_client: Redis, issuer: str, headers: dict[str, str]) -> None:
    """Also not one of an origin that may use the API with a key."""
    async with console(redis_client, issuer, allowed_origins=["https://evil.example"]) as stand:
        await sign_in(stand, "ada")
        for path in ("/admin/keys", "/console/sign-out", "/admin/tiers/reload", "/v1/chat/completions"):
            assert error_of(await stand.post(path, {"name": "n"}, headers=headers), 403)["code"] == "origin_not_allowed"
        read = await stand.http.get("/admin/keys", headers=headers)
        assert read.status_code == (403 if headers else 200)
        assert (await session(stand))["user"] == "ada@example.com"
        own = {"sec-fetch-site": "same-origin"}
        assert (await stand.post("/admin/keys", {"name": "n"}, headers=own)).status_code == 200


async def test_a_key_goes_before_the_session(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        await sign_in(stand, "bob")
        key = {"authorization": "Bearer sk-operator"}
        assert (await stand.post("/admin/keys", {"name": "n"}, headers=key)).status_code == 200
        assert (await stand.http.get("/admin/keys", headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_a_callback_that_was_not_asked_for_signs_nobody_in(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as victim, console(redis_client, issuer) as attacker:
        location = await go_to_provider(attacker)
        assert error_of(await come_back(victim, location, "ada"), 403)["code"] == "sign_in_failed"
        await go_to_provider(victim)
        assert error_of(await come_back(victim, location, "ada"), 403)["code"] == "sign_in_failed"
        for query in ("", "?code=1", "?error=access_denied", "?code=1&state=2"):
            error_of(await victim.http.get(f"/console/callback{query}"), 403)
        assert (await session(victim))["user"] is None


async def test_a_code_is_good_once(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        location = await go_to_provider(stand)
        query = parse_qs(urlsplit(location).query)
        assert query["code_challenge_method"] == ["S256"] and query["nonce"] and query["state"]
        async with httpx.AsyncClient(verify=False) as browser:
            consent = await browser.post(location, data={"sub": "ada"})
        first = await stand.http.get(consent.headers["location"])
        again = await stand.http.get(consent.headers["location"])
        assert (first.status_code, again.status_code) == (303, 403)


async def test_the_tokens_of_another_issuer_are_refused(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer.replace("localhost", "127.0.0.1")) as stand:
        own = stand.gateway.sign_in
        assert own is not None
        metadata = await own.provider.load_server_metadata()
        metadata["token_endpoint"] = f"{issuer}/oauth2/token"  # whose tokens are of `localhost`
        with structlog.testing.capture_logs() as logs:
            error_of(await sign_in(stand, "ada"), 403)
        assert (await session(stand))["user"] is None
        [failure] = [entry["error"] for entry in logs if entry["event"] == "a sign-in failed"]
        assert "iss" in failure


async def test_sign_ins_that_are_not_finished_do_not_fill_the_cookie(redis_client: Redis, issuer: str) -> None:
    async with console(redis_client, issuer) as stand:
        await sign_in(stand, "ada")
        sizes = set()
        for _ in range(3):
            await go_to_provider(stand)
            sizes.add(len(stand.http.cookies[COOKIE]) // 100)
        assert len(sizes) == 1
        assert (await session(stand))["user"] == "ada@example.com", "until somebody else has signed in"


async def test_nobody_stays_signed_in_by_asking_for_a_sign_in(redis_client: Redis, issuer: str) -> None:
    """Whatever renews the cookie, its user has to come back from the provider when a working day is over."""
    clock = ShiftedClock()
    async with console(redis_client, issuer, clock=clock) as stand:
        await sign_in(stand, "bob")
        clock.shift_s = SESSION_S - 60
        await go_to_provider(stand)
        assert (await session(stand))["user"] == "bob@example.com"
        clock.shift_s = SESSION_S + 60
        assert await session(stand) == {"sign_in": True, "user": None, "role": None}
        assert (await stand.http.get("/admin/keys")).status_code == 401


async def test_without_the_provider_keys_still_work(redis_client: Redis) -> None:
    async with console(redis_client, "http://127.0.0.1:9") as stand:
        assert error_of(await stand.http.get("/console/sign-in"), 502)["code"] == "sign_in_failed"
        key = {"authorization": "Bearer sk-operator"}
        assert (await stand.http.get("/admin/keys", headers=key)).status_code == 200


async def test_without_settings_nothing_is_there(redis_client: Redis) -> None:
    async with running_stand(redis=redis_client, api_key=SecretStr("sk-operator")) as stand:
        assert await session(stand) == {"sign_in": False, "user": None, "role": None}
        for method, path in (("GET", "sign-in"), ("GET", "callback"), ("POST", "sign-out")):
            assert (await stand.http.request(method, f"/console/{path}")).status_code == 404
        answer = await stand.http.get(
            "/admin/keys", headers={"cookie": f"{COOKIE}=x", "authorization": "Bearer sk-operator"}
        )
        assert (answer.status_code, "set-cookie" in answer.headers, answer.headers.get("vary")) == (200, False, None)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"oidc_client_id": None}, "needs --oidc-client-id"),
        ({"oidc_roles": None}, "needs --oidc-client-id"),
        ({"oidc_roles": "groups=sre"}, "must be CLAIM=VALUE:ROLE"),
        ({"oidc_roles": "groups=sre:root"}, "must be CLAIM=VALUE:ROLE"),
        ({"api_key": None}, "without them, access is open"),
        ({"oidc_issuer": "example.com"}, "oidc_issuer"),
    ],
)
def test_half_of_the_settings_are_refused(missing: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {
        "api_key": "sk-operator",
        "oidc_issuer": "https://id.example.com",
        "oidc_client_id": "tidegate",
        "oidc_client_secret": "secret",
        "oidc_roles": "groups=sre:admin,groups=staff:read",
    }
    assert GatewaySettings(**whole).sign_in is not None
    with pytest.raises(ValidationError, match=message):
        GatewaySettings(**whole | missing)


def test_rules_give_the_highest_role_that_fits() -> None:
    rules = [
        RoleRule.parse(text) for text in ("g=a:read", "g=b:admin", "https://x/role=c:d:operate", "email=a@b:admin")
    ]
    own = SignIn("https://i", "c", "s", "openid", rules)
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"g": ["a", "b"]}, "admin"),
        ({"g": "a"}, "read"),
        ({"g": "ab"}, None),
        ({"g": {"a": 1}}, None),
        ({"https://x/role": "c:d"}, "operate"),
        ({"email": "a@b"}, None),
        ({"email": "a@b", "email_verified": "true"}, None),
        ({"email": "a@b", "email_verified": True}, "admin"),
        ({}, None),
    ]
    assert [own.role_of(claims) for claims, _ in cases] == [role for _, role in cases]
