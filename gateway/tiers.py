"""What a gateway uses the tiers for, and what would keep it from using others: implements `tier_follower.Subject`."""

from gateway.batches import BatchService
from gateway.identity import Keyring
from scheduler.client.client import SchedulerClient
from scheduler.config import TierSet


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
