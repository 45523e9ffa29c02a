"""Every key, channel and lifetime that Tidegate's scheduler uses in Redis, in one place.

Knows names, not commands. Times in Redis are integer milliseconds of Unix time.

The store must be one server, not a cluster: a script derives each request's key from the request's id, so the keys of
one script belong to many cluster slots.
"""

# Queue ------------------------------------------------------------------------------------------------

# Sorted set per tier: `tidegate:queue:realtime`. Score = deadline in ms. Member = `<16 digits>:<prompt tokens>:<most
# output tokens>:<request id>`; the digits number the puts, so that equal deadlines are claimed in the order of arrival.
QUEUE_PREFIX = "tidegate:queue:"

# Hash per tier with waiting requests. Fields prompt and output: sums of these tokens over the tier's sorted set.
WAITING_PREFIX = "tidegate:waiting:"

# Hash per request, from put until ack or cancel. Fields: tier, member, deadline_ms, payload (msgpack `Request`),
# attempt (number of claims, without the released ones), and, while leased, fence and worker. No TTL, because a line of
# a batch may wait for a day.
REQUEST_PREFIX = "tidegate:request:"

# Sorted set of all leased requests. Score = expiry of the lease in ms; member = request id.
LEASES = "tidegate:leases"

# The last number given to a put or a claim. Only grows, and outlives all requests.
SEQUENCE = "tidegate:sequence"

# Pub/sub channel: `wake` after a put or a requeue, `cancel:<request id>` when a leased request was cancelled.
WAKE = "tidegate:wake"

# Events -----------------------------------------------------------------------------------------------

# Stream per gateway. Exists while the gateway listens.
EVENTS_PREFIX = "tidegate:events:"

# A gateway that has not refreshed its stream for this long counts as gone, and workers drop its requests. Well above
# any pause of a busy gateway process, and well below the time that workers should spend on requests of a dead gateway.
EVENTS_TTL_S = 30.0

# Time between two refreshes of that TTL. Each refresh also trims the entries that were read.
EVENTS_HEARTBEAT_S = 2.0

# The most messages in a stream: enough for minutes of steps, while listeners trim it every heartbeat.
EVENTS_MAXLEN = 10_000

# Workers ----------------------------------------------------------------------------------------------

# Set of announced worker ids. A reader removes ids whose hash has expired.
WORKERS = "tidegate:workers"

# Hash per live worker: status (msgpack `WorkerStatus`), metrics (Prometheus text), sla (JSON).
WORKER_PREFIX = "tidegate:worker:"

# A worker announces itself about every second. After several missed announcements in a row it counts as dead.
WORKER_TTL_S = 6.0

# Tiers ------------------------------------------------------------------------------------------------

# Hash. `generation`: the last number given to a document. `in_force`: the document that all gateways and workers follow
# (msgpack `TierDocument`). It outlives them; the first process of the next start replaces it with its own file.
TIERS = "tidegate:tiers"

# The proposed document, if any. One at a time, and it expires soon.
TIERS_PROPOSED = "tidegate:tiers:proposed"
TIERS_PROPOSED_TTL_S = 15.0

# Pub/sub channel: a message of any content means that one of the two keys above has changed.
TIERS_NEWS = "tidegate:tiers:news"

# Set of the gateways and workers that follow the tiers, and for each a key (msgpack `Follower`). The key outlives a few
# missed reports.
FOLLOWERS = "tidegate:followers"
FOLLOWER_PREFIX = "tidegate:follower:"
FOLLOWER_TTL_S = 4.0

# Durability -------------------------------------------------------------------------------------------

# Written just before WAITAOF, which waits only for the writes of its own connection. This write follows all earlier
# ones of any connection, so once it is on disk they are too.
DURABLE = "tidegate:durable"
DURABLE_TTL_S = 60.0


def tier_queue(tier: str) -> str:
    return QUEUE_PREFIX + tier


def tier_waiting(tier: str) -> str:
    return WAITING_PREFIX + tier


def events(gateway_id: str) -> str:
    return EVENTS_PREFIX + gateway_id


def worker(worker_id: str) -> str:
    return WORKER_PREFIX + worker_id


def follower(part: str) -> str:
    return FOLLOWER_PREFIX + part
