"""Send one webhook: resolve the name, check the address, and post to that address, once.

Redirects are not followed, the answer's body is not read, proxies of the environment are not used, and the whole call
has a time limit. Knows HTTP; does not know what is sent, and does not try again.
"""

import asyncio
import ssl
from urllib.parse import urlsplit

from gateway.jobs.webhooks.lookups import Lookups
from gateway.keys.webhooks import Address, TargetPolicy

TIMEOUT_S = 15.0  # seconds for a whole call, from the time at which its host's name is looked up
GONE = 410  # the status of a receiver that wants no more webhooks, as in Standard Webhooks


class WebhookFailed(Exception):
    """The webhook was not taken. The message says why; `is_final` is True if the receiver wants no repetition."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class WebhookSender:
    """Posts webhooks to the addresses that `policy` allows. `context` is for servers with certificates of their own."""

    def __init__(
        self,
        policy: TargetPolicy,
        *,
        lookups: Lookups | None = None,
        context: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._policy = policy
        self._lookups = lookups or Lookups()
        self._context = context
        self._timeout_s = timeout_s

    async def send(
        self, url: str, headers: dict[str, str], body: bytes, attempt: int = 0, owner: str | None = None
    ) -> None:
        """Post `body` to `url` for `owner`. Raises `WebhookFailed` unless the answer has a status from 200 to 299.

        Of several allowed addresses, the number of the attempt chooses one. Raises `LookupsBusy` if the host's name
        cannot be looked up at the moment.
        """
        import httpx  # by the first webhook: most gateways send none

        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        lookup = await self._lookups.begin(host, port, owner)
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._post(url, host, await asyncio.shield(lookup), headers, body, attempt)
        except TimeoutError:
            raise WebhookFailed(f"no answer within {self._timeout_s:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise WebhookFailed(f"{type(error).__name__}: {error}"[:300]) from None
        if not 200 <= status < 300:
            raise WebhookFailed(f"status {status}", is_final=status == GONE)

    async def _post(
        self, url: str, host: str, found: list[Address], headers: dict[str, str], body: bytes, attempt: int
    ) -> int:
        parts = urlsplit(url)
        allowed = [address for address in found if self._policy.allows(address, parts.scheme)]
        if not allowed:
            raise WebhookFailed("its address is not one that may be called")
        import httpx

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

    async def _tls(self) -> ssl.SSLContext:
        """Return the context of all calls. It is made at the first one, in a thread: that takes 50 ms."""
        if self._context is None:
            self._context = await asyncio.to_thread(ssl.create_default_context)
        return self._context
