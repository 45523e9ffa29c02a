"""TLS for the connections of the server.

Knows certificates and handshakes; does not know HTTP. asyncio's own TLS servers show a connection only after its
handshake, for which a client may take a minute. Here a connection counts from the beginning, and its handshake has the
time that a request's headers have (gateway/http/server/connections.py).
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.http.server.connections import Closed, ConnectionTable

ProtocolFactory = Callable[..., asyncio.Protocol]


class CertificateError(Exception):
    """The certificate cannot be used. The message is one sentence for the operator."""


class Certificate:
    """A certificate and its key. `context` offers them to clients; `reload` reads them again, for new connections."""

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        """The key may be in `certfile` too. Raises `CertificateError`."""
        self._files = certfile, keyfile
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self.reload()

    def reload(self) -> None:
        """Read the files. If they cannot be used, raise `CertificateError`; the certificate in use stays."""
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(trial)  # a certificate whose key is wrong would be left half loaded
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        certfile, keyfile = self._files
        try:
            context.load_cert_chain(certfile, keyfile, password=_no_password)
        except FileNotFoundError as error:
            missing = certfile if not certfile.exists() or keyfile is None else keyfile
            raise CertificateError(f"{missing} does not exist: see --ssl-certfile and --ssl-keyfile") from error
        except (OSError, ValueError) as error:  # SSLError is an OSError
            names = f"{certfile} with the key in {keyfile or certfile}"
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            hint = "--ssl-certfile and --ssl-keyfile need PEM files that belong together, with a key without a password"
            raise CertificateError(f"cannot use the certificate {names} ({reason}): {hint}") from error


def _no_password() -> str:
    """Refuse an encrypted key. Without this function, OpenSSL would ask for its password on the terminal."""
    raise ValueError("the key is encrypted")


def load_certificate(certfile: Path | None, keyfile: Path | None) -> Certificate | None:
    """Return the certificate in these files; None if there is none. Raises `CertificateError`."""
    return None if certfile is None else Certificate(certfile, keyfile)


class TlsHandshake(asyncio.Protocol):
    """A connection until the end of its handshake. Then the protocol of `inner` takes over.

    The handshake runs on a copy of the connection's descriptor, as `connect_accepted_socket` needs it; `start_tls` of
    uvloop 0.23 sometimes waits for ever if the connection is closed meanwhile.
    """

    def __init__(self, certificate: Certificate, table: ConnectionTable, inner: Callable[[], asyncio.Protocol]) -> None:
        self.address = ""
        self._certificate = certificate
        self._table = table
        self._inner = inner
        self._shaking: asyncio.Task[None] | None = None
        self._is_counted = False
        self._owns_copy = True  # until `connect_accepted_socket` has it; a task may be cancelled before it has begun

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._is_counted = True
        if self._table.admit(self):
            with suppress(OSError):  # without a free descriptor, the connection is closed
                connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                self._shaking = asyncio.get_running_loop().create_task(self._shake(connection))
                self._shaking.add_done_callback(lambda _: self._end(connection))
        else:
            self._table.note(Closed.TOO_MANY, self.address)
        if self._shaking is None:
            self._forget()
        transport.abort()

    async def _shake(self, connection: socket.socket) -> None:
        self._owns_copy = False
        seconds = self._table.limits.receive_timeout_s
        with suppress(OSError):  # the client hung up, speaks no TLS, or took too long
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Handover(self._inner, self._forget),
                connection,
                ssl=self._certificate.context,
                ssl_handshake_timeout=seconds,
            )

    def _end(self, connection: socket.socket) -> None:
        self._forget()
        if self._owns_copy:
            connection.close()

    def _forget(self) -> None:
        """Count the connection as a handshake no more."""
        if self._is_counted:
            self._is_counted = False
            self._table.forget(self)

    # -- what the table calls ------------------------------------------------------------------------------------------

    is_sending_body = is_read_paused = False
    num_unsent = 0

    def give_up(self, reason: Closed) -> None:
        self._table.note(reason, self.address)
        self.abort()

    def abort(self) -> None:
        if self._shaking is not None:
            self._shaking.cancel()


class _Handover(asyncio.Protocol):
    """Makes room in the table of connections, and lets the next protocol take over."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], forget: Callable[[], None]) -> None:
        self._inner = inner
        self._forget = forget

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._forget()
        inner = self._inner()
        transport.set_protocol(inner)
        inner.connection_made(transport)


def secured(inner: ProtocolFactory, certificate: Certificate, table: ConnectionTable) -> ProtocolFactory:
    """Return what uvicorn calls for each new connection: a handshake, and then the protocol that `inner` makes."""

    def create(**settings: object) -> asyncio.Protocol:
        return TlsHandshake(certificate, table, lambda: inner(**settings))

    return create
