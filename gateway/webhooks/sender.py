"""Send one webhook: resolve the name, check the address, and post to that address, once.

Redirects are not followed, the answer's body is not read, proxies of the environment are not used, and the whole call
has a time limit. Knows HTTP; does not know what is sent, and does not try again.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx

from gateway.http.hosts import address_of
from gateway.webhooks.target import Address, TargetPolicy

TIMEOUT_S = 15.0  # seconds for a whole call
GONE = 410  # the status of a receiver that wants no more webhooks, as in Standard Webhooks

MAX_LOOKUPS = 4  # threads that resolve names; they are apart from all others, because a name server may be slow

Resolve = Callable[[str, int], list[Address]]


class WebhookFailed(Exception):
    """The webhook was not taken. The message says why; `is_final` is True if the receiver wants no repetition."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def addresses_of(host: str, port: int) -> list[Address]:
    """Return the addresses of a host name, in the order of the system's preference. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = (address_of(str(entry[4][0]).partition("%")[0]) for entry in found)
    return list(dict.fromkeys(address for address in addresses if address is not None))


class WebhookSender:
    """Posts webhooks to the addresses that `policy` allows. `context` is for servers with certificates of their own."""

    def __init__(
        self,
        policy: TargetPolicy,
        *,
        resolve: Resolve = addresses_of,
        context: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        self._context = context
        self._timeout_s = timeout_s
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "webhook-lookup")

    async def send(self, url: str, headers: dict[str, str], body: bytes, attempt: int = 0) -> None:
        """Post `body` to `url`. Raises `WebhookFailed` unless the answer has a status from 200 to 299.

        Of several allowed addresses, the number of the attempt chooses one.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._post(url, headers, body, attempt)
        except TimeoutError:
            raise WebhookFailed(f"no answer within {self._timeout_s:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise WebhookFailed(f"{type(error).__name__}: {error}"[:300]) from None
        if not 200 <= status < 300:
            raise WebhookFailed(f"status {status}", is_final=status == GONE)

    async def _post(self, url: str, headers: dict[str, str], body: bytes, attempt: int) -> int:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        literal = address_of(host)
        found = [literal] if literal is not None else await self._addresses_of(host, port)
        allowed = [address for address in found if self._policy.allows(address, parts.scheme)]
        if not allowed:
            raise WebhookFailed("its address is not one that may be called")
        target = httpx.URL(url).copy_with(host=str(allowed[attempt % len(allowed)]), fragment=None)
        async with httpx.AsyncClient(verify=await self._tls(), trust_env=False, timeout=self._timeout_s) as client:
            request = client.build_request(
                "POST",
                target,
                headers={**headers, "host": parts.netloc},
                content=body,
                extensions={"sni_hostname": host},  # the name whose certificate must be shown, instead of the address
            )
            response = await client.send(request, stream=True)
            await response.aclose()
            return response.status_code

    async def _addresses_of(self, host: str, port: int) -> list[Address]:
        return await asyncio.get_running_loop().run_in_executor(self._lookups, self._resolve, host, port)

    async def _tls(self) -> ssl.SSLContext:
        """Return the context of all calls. It is made at the first one, in a thread: that takes 50 ms."""
        if self._context is None:
            self._context = await asyncio.to_thread(ssl.create_default_context)
        return self._context
