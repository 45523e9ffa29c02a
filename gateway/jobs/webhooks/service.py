"""Webhooks of one gateway: which URL an event goes to, and the loop that delivers events until they are taken.

Events come from batches (gateway/jobs/batches/run.py) and responses (gateway/jobs/responses/response_ends.py). They are
delivered at least once, in no order. Does not know what a batch or a response is, nor how a webhook is sent.
"""

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Mapping

import structlog

from gateway.identity import ApiKey, Keyring
from gateway.jobs.webhooks.event import Event, event_id, next_attempt_s
from gateway.jobs.webhooks.lookups import LookupsBusy
from gateway.jobs.webhooks.sender import WebhookFailed, WebhookSender
from gateway.jobs.webhooks.store import EventStore
from gateway.keys.webhooks import TargetPolicy, signed_headers
from gateway.protocol.errors import invalid_value
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

METADATA_KEY = "webhook"  # of an object's metadata; its value is the URL
POLL_S = 1.0  # seconds between two looks for events that are due
# Deliveries of one gateway at once. A slow receiver holds one for as long as its time limit.
MAX_IN_FLIGHT, MAX_IN_FLIGHT_OF_OWNER = 64, 32


class WebhookService:
    """Reports events to URLs. `secret` signs the reports of keys without a secret of their own (None: there is none).

    `count` is called with the result of each attempt: `delivered`, `retried` or `gave_up`.
    """

    def __init__(
        self,
        store: EventStore,
        sender: WebhookSender,
        policy: TargetPolicy,
        keyring: Keyring,
        secret: str | None,
        clock: Clock,
        count: Callable[[str], None],
    ) -> None:
        self._store = store
        self._sender = sender
        self._policy = policy
        self._keyring = keyring
        self._secret = secret
        self._clock = clock
        self._count = count
        self._in_flight: dict[asyncio.Task[None], str | None] = {}  # with the owner of its event

    def check(self, metadata: Mapping[str, str] | None, key: ApiKey | None) -> None:
        """Check the URL that an object's metadata names, if it names one.

        Raises `ApiError` 400 if it may not be called, or if there is no secret to sign the reports.
        """
        url = (metadata or {}).get(METADATA_KEY)
        if url is None:
            return
        param = f"metadata.{METADATA_KEY}"
        if self._secret_of(None if key is None else key.name) is None:
            message = (
                "This server signs no webhooks: they need a secret, in the server's setting --webhook-secret "
                "(TIDEGATE_WEBHOOK_SECRET) or in `webhook` of the API key."
            )
            raise invalid_value(param, message)
        if fault := self._policy.fault(url):
            raise invalid_value(param, f"Invalid value for '{param}': {fault}")

    async def announce(self, kind: str, object_id: str, metadata: Mapping[str, str] | None, owner: str | None) -> None:
        """Store the event `kind` of an object, durably, if somebody wants to hear of it. It is delivered later.

        A repeated call has no effect while the event waits; after that, the event is delivered again.
        """
        url = self._url_of(metadata, owner)
        if url is not None:
            now_ms = self._clock.wall_ms()
            event = Event(event_id(kind, object_id), kind, object_id, now_ms // 1000, url, owner)
            await self._store.add(event, now_ms)

    def is_wanted(self, metadata: Mapping[str, str] | None, owner: str | None) -> bool:
        """Return whether somebody wants to hear of the events of an object."""
        return self._url_of(metadata, owner) is not None

    async def follow(self) -> None:
        """Deliver what is due, for ever. Events in delivery when this is cancelled are delivered again later."""
        try:
            while True:
                try:
                    await self._begin_deliveries()
                except STORE_AWAY as error:
                    log.warning("webhooks wait for the store", error=str(error))
                except Exception:
                    log.exception("webhooks could not be delivered; their delivery goes on")
                await self._clock.sleep(POLL_S)
        finally:
            for task in self._in_flight:
                task.cancel()

    async def _begin_deliveries(self) -> None:
        free = MAX_IN_FLIGHT - len(self._in_flight)
        held = Counter(self._in_flight.values())
        now_ms = self._clock.wall_ms()
        for event in await self._store.claim(now_ms, free, MAX_IN_FLIGHT_OF_OWNER, held) if free else ():
            task = asyncio.create_task(self._deliver(event), context=contextvars.Context())
            self._in_flight[task] = event.owner
            task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        del self._in_flight[task]
        if not task.cancelled() and task.exception() is not None:  # the event is due again when its lease ends
            log.error("the delivery of a webhook failed", exc_info=task.exception())

    async def _deliver(self, event: Event) -> None:
        """Send the event once, and remove or postpone it."""
        now_s, body, secret = self._clock.wall_ms() // 1000, event.body(), self._secret_of(event.owner)
        try:
            if secret is None:
                raise WebhookFailed("there is no secret any more")
            headers = {"content-type": "application/json", "user-agent": "tidegate-webhook"}
            headers |= signed_headers(event.id, body, secret, now_s)
            await self._sender.send(event.url, headers, body, event.attempts, event.owner)
        except LookupsBusy:  # the event is due again when its lease ends
            log.warning("a webhook waits: too many names are being looked up", webhook_id=event.id)
            return
        except WebhookFailed as failure:
            return await self._postpone(event, failure)
        await self._store.remove(event)
        self._count("delivered")

    async def _postpone(self, event: Event, failure: WebhookFailed) -> None:
        at_s = None if failure.is_final else next_attempt_s(event, self._clock.wall_ms() / 1000)
        told = {"webhook_id": event.id, "type": event.type, "object_id": event.object_id, "reason": str(failure)}
        if at_s is None:
            await self._store.remove(event)
            self._count("gave_up")
            log.error("a webhook was given up", attempts=event.attempts + 1, **told)
        else:
            await self._store.postpone(event, at_s)
            self._count("retried")
            log.warning("a webhook was not taken; it is tried again", attempts=event.attempts + 1, **told)

    def _url_of(self, metadata: Mapping[str, str] | None, owner: str | None) -> str | None:
        key = self._keyring.named(owner)
        own = None if key is None or key.webhook is None else key.webhook.url
        return (metadata or {}).get(METADATA_KEY) or own

    def _secret_of(self, owner: str | None) -> str | None:
        key = self._keyring.named(owner)
        return key.webhook.secret if key is not None and key.webhook is not None else self._secret
