"""The models that a gateway serves, and which of them a request means.

Each model has queues and workers of its own, and so a client of the scheduler of its own. A request names a model, one
of its aliases, or a split, which shares requests out among models. A model may name another one that answers while it
has no worker. Knows names; does not know bodies or HTTP.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.http.metrics import ModelMetrics
from gateway.identity import service_tier_of
from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.preparation import Model
from scheduler.client.client import SchedulerClient
from scheduler.config import TierSet
from scheduler.reload.coordinator import TierChanges

Split = Mapping[str, int]  # the share of each model, by its main name


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with what answers its requests. `fallback` is the main name of the model that answers without workers."""

    model: Model
    client: SchedulerClient
    completions: CompletionService
    tier_changes: TierChanges
    metrics: ModelMetrics
    fallback: str | None = None

    @property
    def name(self) -> str:
        return self.model.names[0]

    @property
    def tiers(self) -> TierSet:
        """The tiers in force. They may change at any time, so each request reads them only once."""
        return self.client.tiers


@dataclass(frozen=True, slots=True)
class Choice:
    """The model that answers a request, and the name of it in the answer. `why` is empty where the request named it."""

    served: ServedModel
    name: str
    why: str = ""  # or "split" or "fallback"


class Models:
    """The models of one gateway. The first one is the main model: that of requests that name none."""

    def __init__(self, served: Sequence[ServedModel], splits: Mapping[str, Split] | None = None) -> None:
        self._served = tuple(served)
        self._splits = splits or {}
        self._by_name = {name: one for one in served for name in one.model.names}
        self.names = (*self._by_name, *self._splits)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served)

    @property
    def main(self) -> ServedModel:
        return self._served[0]

    def of(self, name: str | None) -> ServedModel:
        """Return the model of this name; of a split, one of its models. An unknown name gets the main model."""
        split = self._splits.get(name or "", ())
        return self._by_name.get(next(iter(split), name or ""), self.main)

    def choose(self, name: str, sender: str | None, *, falls_back: bool = True) -> Choice:
        """Return the model for a request that names `name`. A split always gives one sender the same model.

        `sender` identifies who sent the request; None: nobody knows. With `falls_back`, its fallback may answer.
        An unknown name gets the main model, which refuses it.
        """
        why, chosen = "", name
        if (split := self._splits.get(name)) is not None:
            why, chosen = "split", _share_of(name, split, sender or secrets.token_hex(8))
        served = self.of(chosen)
        if falls_back and served.fallback is not None and not served.client.live.engines:
            other = self._by_name[served.fallback]
            if other.client.live.engines:
                served.client.wait.note_asked()
                return Choice(other, other.name, "fallback")
        return Choice(served, chosen, why)

    async def complete(self, path: str, body: dict[str, Any], placement: Placement) -> tuple[int, dict[str, Any]]:
        """Answer one line of a batch, as `CompletionService.complete` does, by the model that it names.

        Lines wait for a model without workers: its fallback does not answer them. A split's model answers in its own
        batch tier.
        """
        named = body.get("model")
        sender = placement.owner or (placement.part.name.partition("/")[0] if placement.part is not None else None)
        choice = self.choose(named if isinstance(named, str) else "", sender, falls_back=False)
        if choice.why:
            tiers = choice.served.tiers
            tier = tiers[tiers.batch_tier]
            body = {**body, "model": choice.name}
            placement = replace(placement, tier=tier, service_tier=service_tier_of(tier))
        return await choice.served.completions.complete(path, body, placement)


def _share_of(name: str, split: Split, sender: str) -> str:
    """Return the model of `split` for `sender`: senders are spread evenly by a hash, in each split anew."""
    digest = hashlib.sha256(f"{name}\0{sender}".encode()).digest()
    point = int.from_bytes(digest[:8]) * sum(split.values()) >> 64
    for model, weight in split.items():
        if point < weight:
            return model
        point -= weight
    raise AssertionError("the point is less than the sum of the weights")
