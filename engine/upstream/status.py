"""What a server says of itself: its models in /v1/models, and its load in its metrics (Prometheus' text format).

Knows statuses, JSON and metrics; does not know requests.
"""

from typing import Annotated

import msgspec

from engine.streaming import UpstreamBusy, UpstreamLoad, UpstreamUnreachable, UpstreamUnusable
from engine.upstream.dialects import Metrics
from engine.upstream.http import HttpSender

LARGEST = 10**9  # no server has more requests


class _Meta(msgspec.Struct, frozen=True):
    n_ctx: int | None = None


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    meta: _Meta | None = None  # of llama.cpp
    root: str | None = None  # the model's directory or hub id there; None: the server does not tell

    @property
    def context(self) -> int | None:
        """The most tokens of a request; None: the server does not tell."""
        return self.max_model_len or (self.meta.n_ctx if self.meta is not None else None)

    def is_same_model(self, other: "ModelCard") -> bool:
        return (self.id, self.owned_by, self.root) == (other.id, other.owned_by, other.root)


class _ModelList(msgspec.Struct):
    data: list[ModelCard] = []


class _Properties(msgspec.Struct):
    total_slots: Annotated[int, msgspec.Meta(gt=0, le=LARGEST)] | None = None


async def list_models(sender: HttpSender) -> list[ModelCard]:
    """Return the models of a server. Raises `UpstreamError`: only this answer tells that the server itself is there."""
    status, body = await sender.get("/v1/models")
    if status in (401, 403):
        raise UpstreamUnusable(f"The server at {sender.address} wants a key: set TIDEGATE_UPSTREAM_API_KEY.")
    if status == 429:
        raise UpstreamBusy("The server answers 429 to /v1/models.")
    if status != 200:
        raise UpstreamUnreachable(f"The server answers {status} to /v1/models.")
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamUnusable(f"{sender.address}/v1/models is no list of models: {error}.") from error


def load_of(metrics: Metrics, text: str) -> UpstreamLoad:
    """Return the load that `text` tells. Any text can be read: what is odd is unknown."""
    running, waiting, kv_usage = (_sum_of(name, text) for name in (metrics.running, metrics.waiting, metrics.kv_usage))
    return UpstreamLoad(_whole(running), _whole(waiting), kv_usage)


def num_places_of(properties: bytes) -> int | None:
    """Return the most requests that a server runs at once, as its properties tell; None if they do not."""
    try:
        return msgspec.json.decode(properties, type=_Properties).total_slots
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _sum_of(name: str, text: str) -> float | None:
    """Return the sum of a metric over its labels; None if the server does not have it, or if it cannot be true."""
    from prometheus_client.parser import text_string_to_metric_families  # only this function needs it

    lines = [line for line in text.splitlines() if line.startswith(name)]
    try:
        samples = [s for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    except Exception:  # the parser raises errors of several classes
        return None
    values = [sample.value for sample in samples if sample.name == name]
    total = sum(values)
    return total if values and 0 <= total <= LARGEST else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
