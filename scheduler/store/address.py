"""Addresses of stores: what a URL says of servers, Sentinels, TLS, users and passwords.

| URL | meaning |
|---|---|
| `redis://user:password@host:port/db` | a server |
| `redis+sentinel://user:password@host:port,host:port/service/db` | the primary that these Sentinels name |
| `unix:///path/to/socket` | a server of this machine |

`rediss` in place of `redis` means TLS. Options follow after `?`: those of redis-py, such as `ssl_ca_certs`;
`password_file` or `password_command`, which are read or run for each new connection; and, for Sentinels,
`sentinel_username` and `sentinel_password`.
"""

import asyncio
import builtins
import contextlib
import math
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, ConnectionError, TimeoutError

from scheduler.store import keys

CONNECT_TIMEOUT_S = 2.0
SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
SENTINEL_S = 1.0  # a Sentinel that takes longer to connect and to answer is passed over
SENTINEL_PORT = 26379
LOOK_S = 1.0  # between two questions to the Sentinels, while commands are sent
LOOK_LIMIT_S = 0.5  # of such a question, for which a command waits
MISSED_LOOK_S = 10.0  # until the next question, if no Sentinel has answered
PASSWORD_COMMAND_S = 5.0


@dataclass(slots=True)
class Route:
    """The way of a client's connections to the primary."""

    namespace: str = keys.Namespace.prefix  # in front of the keys of its store
    changes: int = 0  # how often it has turned out that connections lead to a wrong or dead node
    service: str = ""
    sentinels: list[Sentinel] = field(default_factory=list)  # one object each; the one that knew last comes first
    _primary: tuple[str, int] | None = None
    _look_due_s: float = 0.0
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self) -> None:
        """Notice a new primary within `LOOK_S`: Sentinels may take ten seconds until they demote the old one."""
        if time.monotonic() < self._look_due_s:
            return
        self._look_due_s = math.inf  # one command waits for the answer, and the others go on
        pause_s = MISSED_LOOK_S
        try:
            with contextlib.suppress(ConnectionError, TimeoutError, builtins.TimeoutError):  # all may still be right
                async with asyncio.timeout(LOOK_LIMIT_S):
                    await self.primary()
                pause_s = LOOK_S
        finally:
            self._look_due_s = time.monotonic() + pause_s

    async def primary(self) -> tuple[str, int] | None:
        """Return host and port of the primary, as a Sentinel says; None without Sentinels.

        Raises `redis.sentinel.MasterNotFoundError`, a `ConnectionError`, if no Sentinel answers or knows it.
        """
        if not self.sentinels:
            return None
        async with self._asking:
            address = await self._ask()
            if self._primary not in (None, address):
                self.changes += 1
            self._primary = address
        return address

    async def _ask(self) -> tuple[str, int]:
        """Ask one Sentinel after the other.

        The time limit is here, because redis-py's uses `asyncio.wait_for`: `scheduler.store.connection` says why not.
        """
        for sentinel in list(self.sentinels):
            try:
                async with asyncio.timeout(SENTINEL_S):
                    host, port = await sentinel.discover_master(self.service)
            except (ConnectionError, TimeoutError, builtins.TimeoutError):
                continue
            finally:
                # It opens its connection again for the next question. A cancellation must not leave it open.
                await asyncio.shield(sentinel.aclose())
            self.sentinels.remove(sentinel)
            self.sentinels.insert(0, sentinel)
            return host, int(port)
        raise MasterNotFoundError(f"No Sentinel knows the primary of {self.service!r}.")


def parse(url: str) -> tuple[dict[str, Any], Route]:
    """Return redis-py's settings of a connection, and its route. Raises `ValueError` if the URL cannot be used."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ValueError(f"the URL of a store begins with one of {', '.join(f'{known}://' for known in SCHEMES)}")
    settings, route = _parse_sentinels(url) if scheme.endswith("+sentinel") else (dict(parse_url(url)), Route())
    source = _Password.of(settings)
    if source is not None:
        settings["credential_provider"] = source
    return settings, route


def _parse_sentinels(url: str) -> tuple[dict[str, Any], Route]:
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the URL needs the name of the Sentinels' service: redis+sentinel://HOST:26379/SERVICE")
    scheme = parts.scheme.removesuffix("+sentinel")
    settings: dict[str, Any] = dict(parse_url(urlunsplit((scheme, f"{user}{at}primary", db, parts.query, ""))))
    options: dict[str, Any] = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    for name in ("username", "password"):
        options[name] = settings.pop(f"sentinel_{name}", None)
    addresses = [_host_and_port(host) for host in hosts.split(",")]
    options |= {"ssl": settings.get("connection_class") is SSLConnection, "protocol": 2}
    options |= {"socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    sentinels = [Sentinel([place], sentinel_kwargs=options) for place in addresses]  # type: ignore[no-untyped-call]
    return settings, Route(service=service, sentinels=sentinels)


def _host_and_port(text: str) -> tuple[str, int]:
    place = urlsplit(f"//{text}")
    if not place.hostname:
        raise ValueError(f"{text!r} is no address of a Sentinel")
    return place.hostname, place.port or SENTINEL_PORT


class _Password(CredentialProvider):
    """A user whose password is in a file, or is printed by a command. Both may change while the program runs."""

    def __init__(self, username: str | None, file: str | None, command: str | None) -> None:
        self._username, self._file, self._command = username, file, command

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "_Password | None":
        """Take the source of the password out of `settings`, and the user with it; None if there is no source."""
        file, command = settings.pop("password_file", None), settings.pop("password_command", None)
        if file is None and command is None:
            return None
        if "password" in settings or (file and command):
            raise ValueError("the store's URL has more than one of a password, password_file and password_command")
        return cls(settings.pop("username", None), file, command)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._read().strip()
        except (OSError, subprocess.SubprocessError) as error:
            raise AuthenticationError(f"the store's password cannot be read: {error}") from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return await asyncio.to_thread(self.get_credentials)

    def _read(self) -> str:
        if self._file is not None:
            return Path(self._file).read_text(encoding="utf-8")
        command = shlex.split(self._command or "")
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PASSWORD_COMMAND_S).stdout
