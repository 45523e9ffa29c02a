"""What a server says of its models in /v1/models. Knows statuses and JSON; does not know dialects."""

import msgspec

from engine.streaming import UpstreamBusy, UpstreamUnreachable, UpstreamUnusable
from engine.upstream.http import HttpSender


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    root: str | None = None  # the model's directory or hub id there; None: the server does not tell

    def is_same_model(self, other: "ModelCard") -> bool:
        return (self.id, self.owned_by, self.root) == (other.id, other.owned_by, other.root)


class _ModelList(msgspec.Struct):
    data: list[ModelCard] = []


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
