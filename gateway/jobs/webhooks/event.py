"""What a webhook tells, in OpenAI's form, and when its delivery is tried again. Pure."""

import hashlib
import json
import random
from dataclasses import dataclass

FIRST_RETRY_S = 5.0  # seconds from the first attempt to the second
RETRY_FACTOR = 4.0  # growth of the pause from each attempt to the next
LONGEST_RETRY_S = 4 * 3600.0  # seconds
GIVE_UP_S = 72 * 3600.0  # seconds after the event in which it is delivered, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class Event:
    """One event, such as `batch.completed`, that is to be delivered to `url`. Times are Unix seconds.

    `owner` is the name of the API key whose secret signs it (None: access was open). `attempts` counts failed ones.
    """

    id: str
    type: str
    object_id: str
    created_at: int
    url: str
    owner: str | None = None
    attempts: int = 0

    def body(self) -> bytes:
        """Return OpenAI's event object. It is the same for each attempt."""
        data = {"id": self.object_id}
        event = {"object": "event", "id": self.id, "type": self.type, "created_at": self.created_at, "data": data}
        return json.dumps(event, separators=(",", ":")).encode()


def event_id(kind: str, object_id: str) -> str:
    """Return the id of the event that `kind` happened to an object. It is the same if the event is reported again."""
    return f"evt_{hashlib.sha256(f'{kind}/{object_id}'.encode()).hexdigest()[:24]}"


def next_attempt_s(event: Event, now_s: float) -> float | None:
    """Return the time of the next attempt, after one that has failed at `now_s`; None if it is time to give up.

    The pause is up to a tenth longer, so that receivers do not get all at once what they have missed.
    """
    pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * RETRY_FACTOR ** min(event.attempts, 10))
    at_s = now_s + pause_s * random.uniform(1.0, 1.1)
    return at_s if at_s < event.created_at + GIVE_UP_S else None
