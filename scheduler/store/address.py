"""Addresses of stores: what a URL says of servers, Sentinels, clusters, TLS, users, passwords and deployments.

| URL | meaning |
|---|---|
| `redis://user:password@host:port/db` | a server |
| `redis+sentinel://user:password@host:port,host:port/service/db` | the primary that these Sentinels name |
| `redis+cluster://user:password@host:port,host:port` | that primary of a cluster which has the deployment's slot |
| `unix:///path/to/socket` | a server of this machine |

`rediss` in place of `redis` means TLS. Options follow after `?`: those of redis-py, such as `ssl_ca_certs`;
`password_file` or `password_command`, which are read or run for each new connection; `deployment`, a name in place of
`tidegate` in front of all keys, so that several deployments can share a store; `model`, the name of one of several
models of a deployment, each of which has queues and workers of its own; and, for Sentinels, `sentinel_username` and
`sentinel_password`.
"""

import asyncio
import difflib
import inspect
import re
import shlex
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from scheduler.store.keys import Namespace
from scheduler.store.route import Address, ClusterGuide, Route, SentinelGuide

CONNECT_TIMEOUT_S = 2.0
SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "unix")
SENTINEL_PORT, CLUSTER_PORT = 26379, 6379  # where the URL names none
DEPLOYMENT = re.compile(r"[\w.-]{1,64}", re.ASCII)
PASSWORD_COMMAND_S = 5.0
OWN_OPTIONS = frozenset({"password_file", "password_command", "deployment"})
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
POOL_OPTIONS = ("connection_class", "max_connections", "timeout")  # of redis-py's pools, not of its connections


def parse(url: str) -> tuple[dict[str, Any], Route]:
    """Return redis-py's settings of a connection, and its route. Raises `ValueError` if the URL cannot be used.

    In a cluster, all keys begin with a hash tag, the deployment's name in braces, which gives them one slot.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the URL of a store begins with one of {', '.join(f'{known}://' for known in SCHEMES)}")
    scheme, _, guides = parts.scheme.partition("+")
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if guides:
        url = urlunsplit((scheme, f"{user}{at}primary", db, parts.query, ""))
    if parts.scheme != "unix":
        _check_database(urlsplit(url).path.strip("/"))
    settings: dict[str, Any] = dict(parse_url(url))
    deployment = settings.pop("deployment", Namespace.prefix.removesuffix(":"))
    if not DEPLOYMENT.fullmatch(deployment):
        raise ValueError(f"{deployment!r} is no name of a deployment: letters, digits, '_', '.' and '-' are")
    if (model := settings.pop("model", "")) != "":
        deployment += f":model:{quote(model, safe='')}"
    namespace = f"{{{deployment}}}:" if guides == "cluster" else f"{deployment}:"
    source = _Password.of(settings)
    if source is not None:
        settings["credential_provider"] = source
    _check_options(settings, SENTINEL_OPTIONS if guides == "sentinel" else ())
    if guides == "sentinel":
        return settings, _sentinel_route(service, hosts, settings, namespace)
    if guides == "cluster":
        if service or db:
            raise ValueError("the URL of a cluster has neither a service nor a database")
        places = [_address(host, CLUSTER_PORT) for host in hosts.split(",")]
        return settings, Route(namespace, [ClusterGuide(place, namespace, settings) for place in places])
    return settings, Route(namespace)


def _check_database(text: str) -> None:
    """Raise `ValueError` if the path of a URL is no database's number: redis-py would take database 0."""
    if text and not text.isdecimal():
        raise ValueError(
            f"{text!r} is no number of a database: a store's URL ends with one, such as /0, or with none. A name in "
            "front of all keys is ?deployment=NAME"
        )


def _check_options(settings: dict[str, Any], more: Collection[str]) -> None:
    """Raise `ValueError` for an option that no connection takes: each would fail because of it."""
    kind = settings.get("connection_class", Connection)
    theirs = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}
    known = {*theirs, *POOL_OPTIONS, *more}
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known | OWN_OPTIONS, 1)
            hint = f"; is {close[0]!r} meant?" if close else ""
            raise ValueError(f"{name!r} is no option of a store's URL{hint}")


def of_model(url: str, model: str) -> str:
    """Return the URL of the queues and workers of one of several models, on the store at `url`."""
    parts = urlsplit(url)
    options = [*parse_qsl(parts.query, keep_blank_values=True), ("model", model)]
    return urlunsplit(parts._replace(query=urlencode(options)))


def _sentinel_route(service: str, hosts: str, settings: dict[str, Any], namespace: str) -> Route:
    if not service:
        raise ValueError("the URL needs the name of the Sentinels' service: redis+sentinel://HOST:26379/SERVICE")
    options: dict[str, Any] = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    options["ssl"] = settings.get("connection_class") is SSLConnection
    for name in SENTINEL_OPTIONS:
        options[name.removeprefix("sentinel_")] = settings.pop(name, None)
    places = [_address(host, SENTINEL_PORT) for host in hosts.split(",")]
    return Route(namespace, [SentinelGuide(place, service, options) for place in places])


def _address(text: str, default_port: int) -> Address:
    place = urlsplit(f"//{text}")
    if not place.hostname:
        raise ValueError(f"{text!r} is no address of a server")
    return place.hostname, place.port or default_port


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
