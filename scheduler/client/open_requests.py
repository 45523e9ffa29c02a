"""The requests of a gateway that have had no last event: their streams, and which of them the queue has lost.

Passes token events on, and makes those that no worker can make. Does no I/O.
"""

from collections.abc import Iterable, Iterator, Sequence

from engine.interface import FinishReason
from scheduler.client.admission import Admission
from scheduler.client.token_stream import TokenStream
from scheduler.request import Checkpoint, EventKind, TokenEvent


class OpenRequests:
    """The open requests, by id. `admission` learns of their events and ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._streams: dict[str, TokenStream] = {}
        self._being_put: set[str] = set()  # ids of open requests whose `put` has not returned yet
        self._missing: set[str] = set()  # ids of open requests that the queue did not know at the last check

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def add(self, request_ids: Iterable[str], stream: TokenStream) -> None:
        """Add requests that are about to be put: the first event may come before `put` returns."""
        for request_id in request_ids:
            self._streams[request_id] = stream
            self._being_put.add(request_id)

    def note_put(self, request_ids: Iterable[str]) -> None:
        """Note that the `put` of requests has returned."""
        self._being_put.difference_update(request_ids)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._admission.forget(request_id)

    def of_tiers(self, tiers: Sequence[str]) -> list[str]:
        """Return the ids of the requests of these tiers that the queue has."""
        return [i for i, stream in self._streams.items() if stream.tier in tiers and i not in self._being_put]

    def deliver(self, events: Iterable[TokenEvent], now: float) -> list[TokenEvent]:
        """Pass events to their streams. Return those that ask what was received, for `received`."""
        questions = []
        for event in events:
            stream = self._streams.get(event.request_id)
            is_outdated = stream is None or stream.is_outdated(event)
            if event.kind is EventKind.TAKEN_OVER:
                questions.append(event)
            if stream is None or is_outdated or event.kind is EventKind.TAKEN_OVER:
                continue
            if stream.must_go_on_anew(event):
                questions.append(event)
                continue
            if event.is_last:
                del self._streams[event.request_id]
            self._admission.on_event(event, now)
            stream.deliver(event)
        return questions

    def received(self, events: Iterable[TokenEvent], now: float) -> tuple[list[Checkpoint], list[str]]:
        """Return what was received of requests that have to go on from there.

        Another worker has claimed such a request, or a worker's tokens do not follow those that were received. Also
        return the ids of requests that another worker has claimed although they have
        ended here. A request that only lacks its end gets it.
        """
        received, ended = [], []
        for event in events:
            request_id, stream = event.request_id, self._streams.get(event.request_id)
            if event.kind is EventKind.TAKEN_OVER and stream is not None and stream.has_all(request_id):
                self.deliver([TokenEvent(request_id, EventKind.FINISHED, finish_reason=FinishReason.LENGTH)], now)
                stream = None
            if stream is None:
                ended += [request_id] if event.kind is EventKind.TAKEN_OVER else []
            elif _is_question(event, stream) and not stream.is_outdated(event):
                received.append(stream.received(event))
        return received, ended

    def fail(self, request_ids: Iterable[str], message: str, now: float) -> None:
        """Deliver an UNAVAILABLE event for each request. Only gateways make such events, no worker."""
        self.deliver([TokenEvent(i, EventKind.UNAVAILABLE, error=message) for i in request_ids], now)

    def to_check(self) -> list[str]:
        """Return the ids of the requests that the queue should know."""
        return [i for i in self._streams if i not in self._being_put]

    def lost(self, checked: Sequence[str], known: Sequence[bool]) -> list[str]:
        """Return the requests that the queue did not know at two checks in a row: this one, and the one before.

        Such a request is lost: a failover of the store may have lost its record, or its last event was in an event
        stream that expired. One check is not enough: a request that the queue does not know may just have ended, and
        its last event may still be on the way.
        """
        before = self._missing
        self._missing = {i for i, is_known in zip(checked, known, strict=True) if not is_known}
        return [i for i in checked if i in self._missing and i in before and i in self._streams]


def _is_question(event: TokenEvent, stream: TokenStream) -> bool:
    """Return whether `event` asks, in place of bringing tokens, what was received of its request."""
    return event.kind is EventKind.TAKEN_OVER or stream.must_go_on_anew(event)
