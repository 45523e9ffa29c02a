"""What a gateway is: everything a route needs, in one frozen record, wired by the composition root.

Knows the collaborators by type; builds none of them and starts none of them.
"""

from dataclasses import dataclass

from fastapi import Request

from gateway.batches.service import BatchService
from gateway.completion.service import CompletionService
from gateway.completion.tokenizer import Tokenizer
from gateway.files.store import FileStore
from gateway.http.metrics import GatewayMetrics
from gateway.identity import Keyring
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.reload.coordinator import TierChanges


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one gateway process; it lives in `app.state.gateway`."""

    model_names: tuple[str, ...]
    created: int  # Unix seconds, as `/v1/models` reports it
    client: SchedulerClient
    clock: Clock
    tokenizer: Tokenizer
    keyring: Keyring
    completions: CompletionService
    metrics: GatewayMetrics
    files: FileStore | None = None
    batches: BatchService | None = None
    tier_changes: TierChanges | None = None
    max_body_bytes: int = 16 * 2**20  # a JSON body; uploads to /v1/files have their own limit

    @property
    def tiers(self) -> TierSet:
        """Those in force; look once a request."""
        return self.client.tiers


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves `request`."""
    gateway: Gateway = request.app.state.gateway
    return gateway


class GatewayTiers:
    def __init__(self, client: SchedulerClient, keyring: Keyring, batches: BatchService | None) -> None:
        self._client = client
        self._keyring = keyring
        self._batches = batches

    def objection(self, tiers: TierSet) -> str:
        return self._keyring.objection(tiers)

    def reconfigure(self, tiers: TierSet) -> None:
        """For requests from now on; those under way keep the tier that they were sent to."""
        self._client.reconfigure(tiers)
        if self._batches is not None:
            self._batches.reconfigure(tiers)
