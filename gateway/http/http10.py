"""HTTP/1.0: its clients cannot read chunked answers, such as streams, so the end of the connection ends these answers.

uvicorn's protocol on httptools sends chunks to every client (as of 0.54); its protocol on h11 does not, but takes
several times as long for a request.
"""

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol, which passes connections of HTTP/1.0 clients on to h11.

    The first packet of a connection decides. It has the whole first line unless its URL is unusually long.
    """

    def data_received(self, data: bytes) -> None:
        if self.scope is None and data.partition(b"\r\n")[0].endswith(b" HTTP/1.0"):
            self._pass_on(data)
        else:
            super().data_received(data)

    def _pass_on(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        protocol = H11Protocol(self.config, self.server_state, self.app_state)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(data)
