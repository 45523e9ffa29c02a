"""Requests that another worker has held before: their gateways say what they have received, before they begin here.

Their streams go on from these tokens, also where this engine would give other ones from the start. The answer is a
request that is back in the queue with these tokens (`scheduler.queue.base.Queue.resume`). If it does not come, the
lease ends, and the next claim asks again.
"""

from collections import defaultdict
from collections.abc import Sequence

from scheduler.events.base import EventChannel
from scheduler.queue.base import Queue
from scheduler.request import Claimed, EventKind, TokenEvent
from scheduler.worker.request_intake import RequestIntake


class Takeover:
    def __init__(self, queue: Queue, events: EventChannel, intake: RequestIntake) -> None:
        self._queue = queue
        self._events = events
        self._intake = intake

    async def ask(self, claimed: Sequence[Claimed]) -> None:
        """Ask the gateways of claimed requests. Cancel those whose gateways are gone."""
        self._intake.release([c.request.id for c in claimed])  # what an older lease of this worker has left
        questions: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        for c in claimed:
            questions[c.request.reply_to].append(TokenEvent(c.request.id, EventKind.TAKEN_OVER, fence=c.fence))
        for reply_to, events in questions.items():
            if not await self._events.publish(reply_to, events):
                await self._queue.cancel([event.request_id for event in events])
