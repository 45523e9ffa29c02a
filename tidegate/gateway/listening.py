"""The port on which a gateway serves."""

import errno
import socket

BACKLOG = 2048  # connections that the kernel queues: enough for a burst of clients


class CannotListen(Exception):
    """The gateway cannot listen on its address. The message is one sentence for the operator."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 means any free port. Raises `CannotListen` if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"cannot listen on {host}:{port}: another program does; end it, or choose another port with --port"
        else:
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise CannotListen(reason) from error
