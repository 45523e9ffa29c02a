"""Every key that the gateway uses in Redis, with what it holds and how long it lives. The scheduler's are in
scheduler/store/keys.py.

Knows names; does not know commands. A key without a lifetime here lives until it is deleted. `owner` is the name of an
API key, or None for what was created while access was open. Names that end with ":" stand before an id, or before an
owner ("" for open access). All times are Unix time.
"""

from urllib.parse import quote

from scheduler.store.keys import NAMESPACE

DAY_S = 86_400

# The storage of files.
STORAGE = NAMESPACE + "storage"  # the marker that ties it to this store (JSON `Marker`)
STORAGE_LOCK = NAMESPACE + "storage:lock"  # the lock of the gateway that compares the marker, for half a minute

# Files: JSON records, and indexes of ids.
FILES = NAMESPACE + "files"  # sorted set of ids by position; one for each owner, and for each owner and purpose
FILES_EXPIRY = NAMESPACE + "files:expiry"  # sorted set of the ids of files that expire, by their expiry in s
FILES_BYTES = NAMESPACE + "files:bytes"  # hash: the bytes of all files of each owner
FILES_POSITION = NAMESPACE + "files:position"  # counter: the last position that was given to a file
TOMBSTONE_S = 3600  # seconds for which a deleted file still works as the cursor of a list

# Uploads: hashes with `upload` (JSON), `status`, `received`, and the bytes of each part.
UPLOADS_PENDING = NAMESPACE + "uploads:pending"  # sorted set of `<id>:<bytes>` by their expiry in s; one for each owner
UPLOAD_KEPT_S = DAY_S  # seconds after an upload's expiry, so that a repeated call gets the same answer

# Batches: hashes of JSON values by the names of their fields.
BATCHES = NAMESPACE + "batches"  # sorted set of ids by position; one for each owner
BATCHES_POSITION = NAMESPACE + "batches:position"  # counter: the last position that was given to a batch
BATCHES_UNFINISHED = NAMESPACE + "batches:unfinished"  # set of the ids that are not over, or not yet cleared up
BATCHES_ENDED = NAMESPACE + "batches:ended"  # sorted set of the ids that are over and cleared up, by that time in s
BATCHES_UNFINISHED_OF = NAMESPACE + "batches:unfinished_of"  # set of those, and of some that are over; for each owner
BATCHES_BY_STATUS = NAMESPACE + "batches:by_status"  # hash: the number of batches by status
LENGTHS_TTL_S = 90 * DAY_S
PACE_TTL_S = 900

# Responses. Their lifetime is a setting.
RESPONSE = NAMESPACE + "response:"  # hash: owner, previous, status, input, output, head, lease_ms
RESPONSE_EVENTS = NAMESPACE + "response:events:"  # stream of a background response's events
EVENTS_KEPT_S = 900  # seconds after the last event, if the response is stored for longer
RESPONSES_OF = NAMESPACE + "responses:of:"  # sorted set of an owner's ids, by their expiry in ms
RESPONSES_SIZES = NAMESPACE + "responses:sizes"  # hash: the bytes of each response
RESPONSES_BYTES = NAMESPACE + "responses:bytes-of"  # hash: the bytes of all responses of each owner
RESPONSES_UNTOLD = NAMESPACE + "responses:untold"  # hash: the owner of each whose end is to be announced

# Webhooks. Their lifetime is in gateway/jobs/webhooks/store.py.
WEBHOOK = NAMESPACE + "webhook:"  # an event (JSON)
WEBHOOKS_DUE = NAMESPACE + "webhooks:due:"  # sorted set of an owner's ids, by the time of the next attempt in ms
WEBHOOK_OWNERS = NAMESPACE + "webhooks:owners"  # set of the owners that have events

# Requests with an `Idempotency-Key`.
IDEMPOTENCY = (
    NAMESPACE + "idempotency:"
)  # by a digest of owner and key: hash of fingerprint, token, id, lease_ms, answer
IDEMPOTENCY_ANSWERS = NAMESPACE + "idempotency-answers:"  # sorted set of an owner's `<record>:<bytes>`, by time in ms
IDEMPOTENCY_BYTES = NAMESPACE + "idempotency-bytes:"  # the sum of those bytes
IDEMPOTENCY_S = DAY_S  # of all three, as OpenAI's and Stripe's keys are used: a retry comes within a day

# API keys.
LIMITS = NAMESPACE + "limits:"  # hash: the levels of a key's buckets, until they are full again
USAGE = NAMESPACE + "usage:"  # before a UTC day such as `2026-11-22`: hash of counts, for three months
USAGE_WRITE_S = 3600  # seconds for which a write is remembered: it is repeated until it is known to be done

# Cached answers and dead letters.
CACHED = NAMESPACE + "cache:"  # by a hash of the request: the output of an answer, for as long as the request asked
CACHE_INDEX = NAMESPACE + "cache:index"  # sorted set of the keys of cached outputs, by their expiry in ms
CACHE_SIZES = NAMESPACE + "cache:sizes"  # hash: the bytes of each of them by its key, and their sum as `total`
DEAD_LETTERS = NAMESPACE + "dead_letters"  # sorted set of ids by the time of their end in ms
DEAD_LETTER = NAMESPACE + "dead_letter:"  # a dead letter (JSON)
DEAD_LETTER_S = 7 * DAY_S  # somebody has to look at a dead letter, also after a weekend


def index_of(index: str, owner: str | None) -> str:
    """Return the key of the index that lists only the objects of `owner`."""
    return index if owner is None else f"{index}:of:{quote(owner, safe='')}"


def tombstone(index: str, member: str) -> str:
    """Return the key of the position that a deleted member had in `index`. It lives for `TOMBSTONE_S` seconds.

    A client may delete each file that it lists. The cursor for the next page is then a deleted file, so the position of
    that file is still needed.
    """
    return f"{index}:was_at:{member}"


def file(file_id: str) -> str:
    return f"{NAMESPACE}file:{file_id}"


def file_purpose(purpose: str, owner: str | None) -> str:
    return f"{index_of(FILES, owner)}:purpose:{purpose}"


def upload(upload_id: str) -> str:
    return f"{NAMESPACE}upload:{upload_id}"


def batch(batch_id: str) -> str:
    return f"{NAMESPACE}batch:{batch_id}"


def batch_done(batch_id: str) -> str:
    """Return the key of a bitmap: a bit for each line that has a result."""
    return f"{BATCHES}:done:{batch_id}"


def batch_results(batch_id: str) -> str:
    """Return the key of a hash: the recorded bytes of each content with results of the batch."""
    return f"{BATCHES}:results:{batch_id}"


def batch_owner(batch_id: str) -> str:
    """Return the key of the lock of the gateway that runs the batch. Its lifetime is a setting of that gateway."""
    return f"{BATCHES}:owner:{batch_id}"


def batch_tokens(key_name: str) -> str:
    """Return the key of a hash: the prompt tokens of each unfinished batch of an API key."""
    return f"{BATCHES}:enqueued_tokens:{key_name}"


def batch_lengths(model: str, endpoint: str) -> str:
    """Return the key of a hash: sums over the lengths of finished lines. It lives for `LENGTHS_TTL_S` seconds."""
    return f"{BATCHES}:lengths:{endpoint}:{model}"


def batch_pace(batch_id: str) -> str:
    """Return the key of what a batch got lately (msgpack). It lives for `PACE_TTL_S` seconds."""
    return f"{BATCHES}:pace:{batch_id}"


def open_requests(key_name: str) -> str:
    """Return the key of a sorted set: the ids of an API key's open requests, by the ends of their leases in ms."""
    return f"{LIMITS}{key_name}:open"


def usage_write(write_id: str) -> str:
    return f"{USAGE}write:{write_id}"
