"""Everything a route needs, in one frozen record, wired by the composition root.

Knows the collaborators by type; builds none of them and starts none of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from gateway.completion import CompletionService
from gateway.identity import Keyring
from gateway.metrics import GatewayMetrics
from gateway.tokenizer import Tokenizer
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.reload.coordinator import TierChanges

if TYPE_CHECKING:
    from gateway.batches import BatchService
    from gateway.files import FileStore


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
    files: "FileStore | None" = None
    batches: "BatchService | None" = None
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
