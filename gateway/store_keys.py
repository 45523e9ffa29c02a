"""Every key that the gateway uses in Redis, with what it holds and how long it lives. The scheduler's are in
scheduler/store/keys.py.

Knows names; does not know commands. A key without a lifetime here lives until it is deleted. `owner` is the name of an
API key, or None for what was created while access was open. Names that end with ":" stand before an id, or before an
owner ("" for open access). All times are Unix time.
"""

from datetime import UTC, date, datetime
from urllib.parse import quote

from scheduler.store.keys import Name, Namespace

DAY_S = 86_400
TOMBSTONE_S = 3600  # seconds for which a deleted file still works as the cursor of a list
UPLOAD_KEPT_S = DAY_S  # seconds after an upload's expiry, so that a repeated call gets the same answer
LENGTHS_TTL_S = 90 * DAY_S
PACE_TTL_S = 900
EVENTS_KEPT_S = 900  # seconds after the last event of a background response, if the response is stored for longer
IDEMPOTENCY_S = DAY_S  # as OpenAI's and Stripe's keys are used: a retry comes within a day
USAGE_DAYS = 92  # days for which usage is kept, today included: three months
USAGE_WRITE_S = 3600  # seconds for which a write is remembered: it is repeated until it is known to be done
DEAD_LETTER_S = 7 * DAY_S  # somebody has to look at a dead letter, also after a weekend


class GatewayKeys(Namespace):
    """The gateway's keys."""

    # The storage of files.
    storage = Name("storage")  # the marker that ties it to this store (JSON `Marker`)
    storage_lock = Name("storage:lock")  # the lock of the gateway that compares the marker, for half a minute

    # Files: JSON records, and indexes of ids.
    files = Name("files")  # sorted set of ids by position; one for each owner, and for each owner and purpose
    files_expiry = Name("files:expiry")  # sorted set of the ids of files that expire, by their expiry in s
    files_bytes = Name("files:bytes")  # hash: the bytes of all files of each owner
    files_position = Name("files:position")  # counter: the last position that was given to a file

    # Uploads: hashes with `upload` (JSON), `status`, `received`, and the bytes of each part.
    uploads_pending = Name("uploads:pending")  # sorted set of `<id>:<bytes>` by their expiry in s; one for each owner

    # Batches: hashes of JSON values by the names of their fields.
    batches = Name("batches")  # sorted set of ids by position; one for each owner
    batches_position = Name("batches:position")  # counter: the last position that was given to a batch
    batches_unfinished = Name("batches:unfinished")  # set of the ids that are not over, or not yet cleared up
    batches_ended = Name("batches:ended")  # sorted set of the ids that are over and cleared up, by that time in s
    batches_unfinished_of = Name("batches:unfinished_of")  # set of those, and of some that are over; for each owner
    batches_by_status = Name("batches:by_status")  # hash: the number of batches by status

    # Responses and conversations. Their lifetime is a setting.
    response = Name("response:")  # hash: owner, previous, status, input, output, head, lease_ms, version
    response_events = Name("response:events:")  # stream of a background response's events
    responses_of = Name("responses:of:")  # sorted set of an owner's ids, by their expiry in ms
    responses_sizes = Name("responses:sizes")  # hash: the bytes of each response
    responses_bytes = Name("responses:bytes-of")  # hash: the bytes of all responses of each owner
    responses_untold = Name("responses:untold")  # hash: the owner of each whose end is to be announced

    # Webhooks. Their lifetime is in gateway/jobs/webhooks/store.py.
    webhook = Name("webhook:")  # an event (JSON)
    webhooks_due = Name("webhooks:due:")  # sorted set of an owner's ids, by the time of the next attempt in ms
    webhook_owners = Name("webhooks:owners")  # set of the owners that have events

    # Requests with an `Idempotency-Key`.
    idempotency = Name("idempotency:")  # by a digest of owner and key: hash of fingerprint, token, id, lease_ms, answer
    idempotency_answers = Name("idempotency-answers:")  # sorted set of an owner's `<record>:<bytes>`, by time in ms
    idempotency_bytes = Name("idempotency-bytes:")  # the sum of those bytes

    # API keys. Those that were created over HTTP are in the store itself.
    api_keys = Name("api-keys")  # hash of JSON records by id
    api_keys_version = Name("api-keys:version")  # counter of their changes
    # Before the quoted name of a key: hash of the levels of its buckets, until they are full again.
    limits = Name("limits:")
    project_limits = Name("project-limits:")  # the same of a project's
    usage = Name("usage:")  # before a UTC day such as `2026-11-22`: hash of counts, for three months
    # Before a UTC day or a month such as `2026-11`: hash of what each key and each project has spent, tokens and cost
    # (nano), with what their open requests have reserved of budgets. It lives for three months, as usage does.
    spent = Name("spent:")

    audit = Name("audit")  # stream of the newest entries of the audit log; how many is in gateway/audit.py

    # Cached answers, whose index and sizes expire with the last of them; and dead letters.
    cached = Name("cache:")  # by a hash of the request: the output of an answer, for as long as the request asked
    cache_index = Name("cache:index")  # sorted set of the keys of cached outputs, by their expiry in ms
    cache_sizes = Name("cache:sizes")  # hash: the bytes of each of them by its key, and their sum as `total`
    dead_letters = Name("dead_letters")  # sorted set of ids by the time of their end in ms
    dead_letter = Name("dead_letter:")  # a dead letter (JSON)

    def file(self, file_id: str) -> str:
        return f"{self.prefix}file:{file_id}"

    def file_purpose(self, purpose: str, owner: str | None) -> str:
        return f"{index_of(self.files, owner)}:purpose:{purpose}"

    def upload(self, upload_id: str) -> str:
        return f"{self.prefix}upload:{upload_id}"

    def batch(self, batch_id: str) -> str:
        return f"{self.prefix}batch:{batch_id}"

    def batch_done(self, batch_id: str) -> str:
        """Return the key of a bitmap: a bit for each line that has a result."""
        return f"{self.batches}:done:{batch_id}"

    def batch_results(self, batch_id: str) -> str:
        """Return the key of a hash: the recorded bytes of each content with results of the batch."""
        return f"{self.batches}:results:{batch_id}"

    def batch_owner(self, batch_id: str) -> str:
        """Return the key of the lock of the gateway that runs the batch. Its lifetime is a setting of that gateway."""
        return f"{self.batches}:owner:{batch_id}"

    def batch_tokens(self, key_name: str) -> str:
        """Return the key of a hash: the prompt tokens of each unfinished batch of an API key."""
        return f"{self.batches}:enqueued_tokens:{key_name}"

    def batch_lengths(self, model: str, endpoint: str) -> str:
        """Return the key of a hash: sums over the lengths of finished lines. It lives for `LENGTHS_TTL_S` seconds."""
        return f"{self.batches}:lengths:{endpoint}:{model}"

    def batch_pace(self, batch_id: str) -> str:
        """Return the key of what a batch got lately (msgpack). It lives for `PACE_TTL_S` seconds."""
        return f"{self.batches}:pace:{batch_id}"

    def open_requests(self, buckets: str) -> str:
        """Return the key of a sorted set beside these buckets: ids of open requests, by their leases' ends in ms."""
        return f"{buckets}:open"

    def usage_of(self, day: date) -> str:
        return f"{self.usage}{day.isoformat()}"

    def spent_in(self, day: date) -> tuple[str, str]:
        """Return the keys of what is spent in this day and in its month."""
        return f"{self.spent}{day.isoformat()}", f"{self.spent}{day:%Y-%m}"

    def usage_write(self, meter_id: str) -> str:
        """Return the key with the number of a gateway's last write."""
        return f"{self.usage}write:{meter_id}"


def spender(name: str, is_project: bool) -> str:
    """Return what stands before `:tokens` and `:cost` in the fields of what a key or a project has spent."""
    return f"{'project' if is_project else 'key'}:{name}"


def utc_day(at_ms: int) -> date:
    return datetime.fromtimestamp(at_ms / 1000, UTC).date()


def index_of(index: str, owner: str | None) -> str:
    """Return the key of the index that lists only the objects of `owner`."""
    return index if owner is None else f"{index}:of:{quote(owner, safe='')}"


def tombstone(index: str, member: str) -> str:
    """Return the key of the position that a deleted member had in `index`. It lives for `TOMBSTONE_S` seconds.

    A client may delete each file that it lists. The cursor for the next page is then a deleted file, so the position of
    that file is still needed.
    """
    return f"{index}:was_at:{member}"
