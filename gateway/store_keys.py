"""Every key that the gateway uses in Redis, with what it holds and how long it lives. The scheduler's are in
scheduler/store/keys.py.

Knows names; does not know commands. A key without a lifetime here lives until it is deleted. `owner` is the name of an
API key, or None for what was created while access was open. All times are Unix time.
"""

from urllib.parse import quote

from scheduler.store.keys import NAMESPACE

DAY_S = 86_400

# Storage ----------------------------------------------------------------------------------------------

# The marker that ties the storage of files to this store (JSON `Marker`), and the lock of the gateway that compares it.
STORAGE = NAMESPACE + "storage"
STORAGE_LOCK = NAMESPACE + "storage:lock"

# Files ------------------------------------------------------------------------------------------------

# Sorted set of ids by their positions; one for each owner, and one for each owner and purpose (`file_purpose`).
FILES = NAMESPACE + "files"

# Sorted set of the ids of files that expire, by their expiry in seconds.
FILES_EXPIRY = NAMESPACE + "files:expiry"

# Hash: the bytes of all files of each owner.
FILES_BYTES = NAMESPACE + "files:bytes"

# Counter: the last position that was given to a file.
FILES_POSITION = NAMESPACE + "files:position"


def file(file_id: str) -> str:
    """Return the key of a file's record (JSON)."""
    return f"{NAMESPACE}file:{file_id}"


def file_purpose(purpose: str, owner: str | None) -> str:
    return f"{index_of(FILES, owner)}:purpose:{purpose}"


def index_of(index: str, owner: str | None) -> str:
    """Return the key of the index that lists only the objects of `owner`."""
    return index if owner is None else f"{index}:of:{quote(owner, safe='')}"


def tombstone(index: str, member: str) -> str:
    """Return the key of the position that a deleted member had in `index`. It lives for `TOMBSTONE_S` seconds.

    A client may delete each file that it lists. The cursor for the next page is then a deleted file, so the position of
    that file is still needed.
    """
    return f"{index}:was_at:{member}"


TOMBSTONE_S = 3600

# Uploads ----------------------------------------------------------------------------------------------

# Sorted set of `<id>:<bytes>` of pending uploads, by their expiry in seconds; one for each owner.
UPLOADS_PENDING = NAMESPACE + "uploads:pending"

# Seconds for which both keys outlive an upload's expiry, so that a repeated call gets the same answer.
UPLOAD_KEPT_S = DAY_S


def upload(upload_id: str) -> str:
    """Return the key of an upload: a hash with `upload` (JSON), `status`, `received`, and the bytes of each part."""
    return f"{NAMESPACE}upload:{upload_id}"


# Batches ----------------------------------------------------------------------------------------------

# Sorted set of ids by their positions; one for each owner.
BATCHES = NAMESPACE + "batches"

# Counter: the last position that was given to a batch.
BATCHES_POSITION = NAMESPACE + "batches:position"

# Set of the ids of batches that are not over, or not yet cleared up.
BATCHES_UNFINISHED = NAMESPACE + "batches:unfinished"

# Set of the ids of unfinished batches, and of some that are over; one for each owner.
BATCHES_UNFINISHED_OF = NAMESPACE + "batches:unfinished_of"

# Hash: the number of batches by status.
BATCHES_BY_STATUS = NAMESPACE + "batches:by_status"

LENGTHS_TTL_S = 90 * DAY_S
PACE_TTL_S = 900


def batch(batch_id: str) -> str:
    """Return the key of a batch's record: a hash of JSON values by the names of its fields."""
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


# Responses --------------------------------------------------------------------------------------------

# Before an id: a hash with owner, previous, status, input, output, head and lease_ms. Its lifetime is a setting.
RESPONSE = NAMESPACE + "response:"

# Before an id: the stream of a background response's events. It lives as long as the response, but for
# `EVENTS_KEPT_S` seconds at most after the last event.
RESPONSE_EVENTS = NAMESPACE + "response:events:"
EVENTS_KEPT_S = 900

# Before an owner: sorted set of ids by their expiry in ms.
RESPONSES_OF = NAMESPACE + "responses:of:"

# Hash: the bytes of each response.
RESPONSES_SIZES = NAMESPACE + "responses:sizes"

# Hash: the bytes of all responses of each owner.
RESPONSES_BYTES = NAMESPACE + "responses:bytes-of"

# Hash: the owner of each background response whose end is to be announced.
RESPONSES_UNTOLD = NAMESPACE + "responses:untold"

# Webhooks ---------------------------------------------------------------------------------------------

# Before an id: the event (JSON). Its lifetime is `gateway.jobs.webhooks.store.TTL_S`.
WEBHOOK = NAMESPACE + "webhook:"

# Before an owner: sorted set of the ids of events, by the time of the next attempt in ms.
WEBHOOKS_DUE = NAMESPACE + "webhooks:due:"

# Set of the owners that have events. The empty name stands for open access.
WEBHOOK_OWNERS = NAMESPACE + "webhooks:owners"

# Idempotency ------------------------------------------------------------------------------------------

# Before a digest of owner and `Idempotency-Key`: a hash with fingerprint, token, id, lease_ms and answer.
IDEMPOTENCY = NAMESPACE + "idempotency:"

# Before an owner: sorted set of `<record>:<bytes>` of the kept answers by their time in ms, and the sum of their bytes.
IDEMPOTENCY_ANSWERS = NAMESPACE + "idempotency-answers:"
IDEMPOTENCY_BYTES = NAMESPACE + "idempotency-bytes:"

# Seconds that all three live, as OpenAI's and Stripe's keys are used: a retry comes within a day.
IDEMPOTENCY_S = DAY_S

# API keys ---------------------------------------------------------------------------------------------

# Before an API key's name: a hash with the levels of its buckets, until they are full again.
LIMITS = NAMESPACE + "limits:"

# Before a UTC day such as `2026-11-22`: a hash of counts. It lives for three months.
USAGE = NAMESPACE + "usage:"

# Seconds that the mark of a write lives (`usage_write`). A gateway repeats a write until it knows that it was done.
USAGE_WRITE_S = 3600


def open_requests(key_name: str) -> str:
    """Return the key of a sorted set: the ids of an API key's open requests, by the ends of their leases in ms."""
    return f"{LIMITS}{key_name}:open"


def usage_write(write_id: str) -> str:
    return f"{USAGE}write:{write_id}"


# Answers and dead letters -----------------------------------------------------------------------------

# Before a hash of the request: the output of an answer, for as long as the request has asked for.
CACHED = NAMESPACE + "cache:"

# Sorted set of the keys of cached outputs, by their expiry in ms; hash of their bytes, and their sum as `total`.
CACHE_INDEX = NAMESPACE + "cache:index"
CACHE_SIZES = NAMESPACE + "cache:sizes"

# Sorted set of the ids of dead letters, by the time of their end in ms; before an id: a dead letter (JSON).
DEAD_LETTERS = NAMESPACE + "dead_letters"
DEAD_LETTER = NAMESPACE + "dead_letter:"
DEAD_LETTER_S = 7 * DAY_S  # somebody has to look at a dead letter, also after a weekend
