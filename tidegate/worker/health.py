"""A worker's own port: `/livez`, `/readyz` and `/metrics`, for Kubernetes and Prometheus.

A thread answers, so that there are answers while the model loads, and when the event loop hangs. The port has no
limits but one of time: it is for the machines of the deployment, not for clients.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST

from gateway.http.access.hosts import AllowedHosts, address_of, is_one_host
from scheduler.clock import Clock
from tidegate.supervision.keeper import WATCHDOG_S

TIMEOUT_S = 5.0  # seconds for a client to send its request, and to take the answer
STOP_CHECK_S = 0.1  # seconds between two checks whether the port is to be closed

Answer = tuple[HTTPStatus, str, bytes]  # status, type of the content, content


class WorkerHealth:
    """Answers about one worker. `why_not_ready` returns why it serves no requests; empty: it does."""

    def __init__(self, clock: Clock, why_not_ready: Callable[[], str], render: Callable[[], bytes]) -> None:
        """`render` returns the worker's metrics."""
        self._clock = clock
        self._why_not_ready = why_not_ready
        self._render = render
        self._alive_s: float | None = None  # time of the last sign of life; None: the worker has not served yet

    def note_alive(self) -> None:
        """Note that the event loop runs and the driver is not stuck. Call it every second, from the first time on."""
        self._alive_s = self._clock.now()

    def answer(self, path: str) -> Answer:
        """Return the answer to a GET of this path."""
        match path.partition("?")[0]:
            case "/livez":
                return _said("" if self._is_alive() else f"the worker has hung for more than {WATCHDOG_S:g} s")
            case "/readyz":
                return _said(self._why_not_ready())
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, self._render()
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", b"there are /livez, /readyz and /metrics\n"

    def _is_alive(self) -> bool:
        return self._alive_s is None or self._clock.now() - self._alive_s < WATCHDOG_S


def _said(trouble: str) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return status, "text/plain", f"{trouble or 'ok'}\n".encode()


@contextmanager
def answering(listener: socket.socket, answer: Callable[[str], Answer]) -> Iterator[None]:
    """Let a thread answer GET and HEAD requests at `listener` within the block.

    At a loopback address, the `Host` header must be one of this machine, as at a gateway. Elsewhere any one is taken,
    since a scraper may know the worker by any name.
    """
    bound: str = listener.getsockname()[0]
    address = address_of(bound)
    allowed = AllowedHosts(() if address and address.is_loopback else ("*",), bound)

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            status, kind, content = self._refusal() or answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def _refusal(self) -> Answer | None:
            hosts = self.headers.get_all("Host") or [""] * (self.request_version == "HTTP/1.0")
            if not is_one_host(hosts):
                return HTTPStatus.BAD_REQUEST, "text/plain", b"a request must have exactly one valid Host header\n"
            if not allowed.allows(hosts[0]):
                return (
                    HTTPStatus.FORBIDDEN,
                    "text/plain",
                    b"this Host is not allowed here: use the address, or localhost\n",
                )
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: probes come every few seconds."""

    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    thread = threading.Thread(target=server.serve_forever, args=(STOP_CHECK_S,), name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
