"""Every key, channel and lifetime that Tidegate's scheduler uses in Redis, in one place.

Knows names; knows no commands. Times in Redis are integer milliseconds of Unix time.

The store is one server, not a cluster: the scripts derive a request's key from its id, so keys of many slots
meet in one script.
"""

# Queue ------------------------------------------------------------------------------------------------

# Sorted set per tier: `tidegate:queue:realtime`. Score = deadline in ms. Member = `<16 digits>:<prompt tokens>:<most
# output tokens>:<request id>`; the digits number the puts, so that equal deadlines leave in the order of their coming.
QUEUE_PREFIX = "tidegate:queue:"

# Hash per tier with waiting requests: prompt, output: the sums of these tokens over the members of its sorted set.
WAITING_PREFIX = "tidegate:waiting:"

# Hash per request, from put until ack or cancel: tier, member, deadline_ms, payload (msgpack `Request`),
# attempt (claims, without those released), and, while leased, fence and worker. No TTL: a batch line may wait
# for a day.
REQUEST_PREFIX = "tidegate:request:"

# Sorted set of all leased requests. Score = when the lease expires, in ms; member = request id.
LEASES = "tidegate:leases"

# The last number given to a put or a claim; never goes back. The one key that outlives all requests.
SEQUENCE = "tidegate:sequence"

# Pub/sub channel: `wake` after a put or a requeue, `cancel:<request id>` when a leased request was cancelled.
WAKE = "tidegate:wake"

# Events -----------------------------------------------------------------------------------------------

# Stream per gateway; it exists while the gateway listens.
EVENTS_PREFIX = "tidegate:events:"

# A gateway that has not been heard of for this long is gone, and publishers drop its work. Well above any
# pause of a busy gateway process, well below what a worker should waste on a dead one.
EVENTS_TTL_S = 30.0

# How often a listener refreshes that TTL and trims what it has read.
EVENTS_HEARTBEAT_S = 2.0

# Messages a stream holds at most: minutes of steps, while listeners trim every heartbeat.
EVENTS_MAXLEN = 10_000

# Workers ----------------------------------------------------------------------------------------------

# Set of worker ids that were announced; ids whose hash has expired are removed by whoever notices.
WORKERS = "tidegate:workers"

# Hash per live worker: status (msgpack `WorkerStatus`), metrics (Prometheus text), sla (JSON).
WORKER_PREFIX = "tidegate:worker:"

# A worker announces itself every second or so; several missed announcements in a row and it counts as dead.
WORKER_TTL_S = 6.0

# Tiers ------------------------------------------------------------------------------------------------

# Hash: `generation`, the last number given to a document; `in_force`, the one that all parts follow (msgpack
# `TierDocument`). It outlives the parts; the first of the next ones puts its own file there.
TIERS = "tidegate:tiers"

# The document that is being decided on: one at a time, and not for long.
TIERS_PROPOSED = "tidegate:tiers:proposed"
TIERS_PROPOSED_TTL_S = 15.0

# Pub/sub channel: a message, of any content, when one of the two above has changed.
TIERS_NEWS = "tidegate:tiers:news"

# Set of the parts that follow them, and for each a key (msgpack `Follower`) that lives a few reports long.
FOLLOWERS = "tidegate:followers"
FOLLOWER_PREFIX = "tidegate:follower:"
FOLLOWER_TTL_S = 4.0

# Durability -------------------------------------------------------------------------------------------

# Written just before WAITAOF, which waits for the writes of its own connection only: this one comes after
# everything that is to be durable, whichever connection wrote it.
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
