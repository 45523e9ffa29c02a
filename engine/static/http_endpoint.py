"""An endpoint behind HTTP: one POST a batch.

The request's body is `{"items": [...], "count": n}` with exactly B items, of which those after the first n are padding.
The answer's is `{"results": [...]}` with B entries in the same order, each `{"output": ...}` or `{"error": "why"}`.
"""

import asyncio
import math
from collections.abc import Sequence

import httpx
import msgspec

from engine.static.interface import CallFailed, ItemResult, Unreachable, padded, without_padding

# Statuses by which a server, or a proxy before it, says that it takes no work at the moment; for how many seconds in a
# row the items are not the cause. A proxy says 502 and 504 also if one of the items breaks the server; some say 503.
EXCUSED_S = {429: math.inf, 503: 300.0, 502: 30.0, 504: 30.0}
MAX_REASON = 300  # characters of an endpoint's own words that are kept


class _Call(msgspec.Struct):
    items: list[msgspec.Raw]
    count: int


class _Result(msgspec.Struct):
    output: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


class _Reply(msgspec.Struct):
    results: list[_Result]


class HttpEndpoint:
    """Implements `engine.static.interface.Endpoint`."""

    def __init__(
        self, url: str, batch: int, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`timeout_s` is the longest time of a call."""
        self.name = _without_password(url)
        self._url = url
        self._batch = batch
        self._timeout_s = timeout_s
        # Less than the time for the call: what has no connection in time has got none of the items.
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s / 2, 5.0))
        self._http = httpx.AsyncClient(timeout=timeout, transport=transport)
        self._encode = msgspec.json.Encoder().encode
        self._decoder = msgspec.json.Decoder(_Reply)

    async def call(self, items: Sequence[bytes], traceparent: str = "") -> list[ItemResult]:
        body = self._encode(_Call([msgspec.Raw(item) for item in padded(items, self._batch)], len(items)))
        results = self._read(await self._post(body, traceparent))
        return [_item_result(r) for r in without_padding(results, len(items), self._batch)]

    async def _post(self, body: bytes, traceparent: str) -> httpx.Response:
        headers = {"content-type": "application/json", **({"traceparent": traceparent} if traceparent else {})}
        try:
            async with asyncio.timeout(self._timeout_s):  # httpx limits the time between two pieces of an answer
                return await self._http.post(self._url, content=body, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(f"{self.name} cannot be reached: {error or 'no connection in time'}") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise CallFailed("The endpoint did not answer in time.") from error
        except httpx.HTTPError as error:
            raise CallFailed(f"The connection to the endpoint broke: {error or type(error).__name__}") from error

    def _read(self, response: httpx.Response) -> list[_Result]:
        if response.status_code != 200:
            reason = f"The endpoint answered {response.status_code}: {response.text[:MAX_REASON]}"
            raise CallFailed(reason, EXCUSED_S.get(response.status_code, 0.0), _retry_after_s(response))
        try:
            return self._decoder.decode(response.content).results
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CallFailed(f'The endpoint\'s answer is not {{"results": [...]}}: {error}'[:MAX_REASON]) from error

    async def close(self) -> None:
        await self._http.aclose()


def _item_result(result: _Result) -> ItemResult:
    if result.error is not None:
        return ItemResult(error=result.error[:MAX_REASON] or "The endpoint gave no reason.")
    output = bytes(result.output)
    try:
        output.decode()  # the decoder does not look into outputs
    except UnicodeDecodeError as error:
        return ItemResult(error=f"The output is not JSON: {error}"[:MAX_REASON])
    return ItemResult(output)


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds of a Retry-After header; 0 if there is none, or if it is a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0


def _without_password(url: str) -> str:
    parts = httpx.URL(url)
    return str(parts.copy_with(userinfo=b""))
