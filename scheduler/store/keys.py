"""Every key, channel and lifetime that Tidegate's scheduler uses in Redis, in one place.

Knows names; does not know commands. Times in Redis are integer milliseconds of Unix time.

A script derives each request's key from the request's id, and one transaction writes keys of several kinds. So all keys
of one deployment must be on one server.
"""

from dataclasses import dataclass
from typing import Self

from redis.asyncio import Redis

# Seconds for which a request's output is kept after its last checkpoint.
OUTPUT_TTL_S = 86_400.0

# Seconds for which the output of a part of a job outlives its request. A gateway that is away for less time continues
# its parts of jobs where they were.
PART_TTL_S = 1800.0

ALONE_TTL_S = 3600.0
CLAIM_TTL_S = 10.0
LEFT_TTL_S = 10.0

DEAD_TTL_S = 7 * 86_400.0  # seconds; somebody has to look at a dead letter, also after a weekend
MAX_DEAD, MAX_DEAD_BYTES = 100_000, 2**28  # of the dead letters of one owner; beyond it, the oldest is removed

# Seconds. The stream and the number of a gateway outlive its last heartbeat for this long. It is well above any outage
# of the store, and above most jumps of its clock (a machine that was asleep), because a gateway that lives must not
# lose its stream. The stream of a dead gateway does not grow: workers drop its requests when its heartbeats stop.
EVENTS_TTL_S = 86_400.0

# Seconds between two heartbeats of a gateway. Each of them also removes the entries that were read.
EVENTS_HEARTBEAT_S = 1.0

# The maximum number of messages in a stream. A listener removes what it has read at every heartbeat. Workers drop the
# requests of a gateway without heartbeats after 4 s, in which 100 workers with 50 steps a second make a fifth of this.
EVENTS_MAXLEN = 100_000

# Seconds. A worker announces itself about every second; after several missed announcements in a row it counts as dead.
WORKER_TTL_S = 6.0

# Seconds. A worker that starts reports every second, but may be held up while it loads its model.
START_TTL_S = 15.0

TIERS_PROPOSED_TTL_S = 15.0
FOLLOWER_TTL_S = 4.0
DURABLE_TTL_S = 60.0
PROBE_TTL_S = 60.0


class Name:
    """The part of a key after the namespace. As an attribute of a `Namespace`, it is the whole key."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __get__(self, namespace: "Namespace", kind: type["Namespace"]) -> str:
        return namespace.prefix + self._part


@dataclass(frozen=True)
class Namespace:
    """Keys that all begin with `prefix`."""

    prefix: str = "tidegate:"

    @classmethod
    def of(cls, client: Redis) -> Self:
        """Return the keys of the deployment that a client of `connection.connect` belongs to."""
        return cls(client.connection_pool.connection_kwargs["route"].namespace)


class Keys(Namespace):
    """The scheduler's keys and channels. One that ends with ":" stands before an id or another name."""

    # Queue ------------------------------------------------------------------------------------------------

    # One sorted set per tier, for example `tidegate:queue:realtime`. The score is the deadline in ms. A member is
    # `<16 digits>:<prompt tokens>:<maximum output tokens>:<request id>`. The digits number the puts, so that requests
    # with equal deadlines are claimed in the order of arrival.
    queue = Name("queue:")

    # One hash per tier that has waiting requests. The fields `prompt` and `output` are the sums of these tokens over
    # the tier's sorted set, `bytes` is the sum of the sizes of the payloads, and `woken_ms` is when a put has last
    # woken a worker.
    waiting = Name("waiting:")

    # One hash per request, from its put until its ack or cancel. Fields: tier, member, deadline_ms, payload (msgpack
    # `Request`), attempt (number of claims that count), part (`Request.job_part`, if it is a part of a job), reply_to
    # (the gateway that waits for it, also if nobody can read the payload), received (number of tokens that this gateway
    # has told to have received, for the next claim; `?` after a claim), and, while leased, fence, worker and waits (1:
    # the request is in no step of the worker, so that the worker's death does not count as an attempt). The hash has no
    # TTL, because a line of a batch may wait for a day.
    request = Name("request:")

    # One string per request that has been checkpointed, or per part of a job, for `OUTPUT_TTL_S`: 16 digits, and the
    # output tokens, 4 bytes each. The digits are the number of the put of the request that may append (zeros: none
    # may). A request whose checkpoint is gone starts from its prompt.
    output = Name("generated:")

    # One string per worker in whose step one request runs alone: the id of this request. It outlives the worker, for
    # `ALONE_TTL_S`, until its requests are given back.
    alone = Name("alone:")

    # One string per worker: the name of its last claim with a result, and the claimed requests (JSON). A claim whose
    # reply was lost is sent again within `CLAIM_TTL_S`.
    claim = Name("claim:")

    # One string: the waiting requests for which a put has woken a certain worker, and which others leave to it (JSON:
    # tier, member, worker id, until when in ms, how busy the worker was). The worker's next claim ends this, so there
    # are few entries: those of the last milliseconds. It lives for `LEFT_TTL_S` after its last change.
    left = Name("left")

    # Sorted set of all leased requests. The score is the expiry of the lease in ms; the member is the request id.
    leases = Name("leases")

    # One set per worker id: the ids of the requests that its processes hold, so that nobody has to search all leases.
    # Which process holds a request is in the request's hash, and counts if the two differ.
    held = Name("held:")

    # The last number given to a put or a claim, and the replication id of the server that gave it. The number only
    # grows, and both outlive all requests.
    sequence = Name("sequence")
    epoch = Name("epoch")

    # One sorted set per tier: the ids of the workers that wait for its next request. The score tells how busy a worker
    # was when it began to wait: the least busy one is woken.
    waiters = Name("waiters:")

    # One pub/sub channel per worker id. The message is `wake` when there is work for this worker, and
    # `cancel:<request id>` when a request was cancelled that it holds.
    wake = Name("wake:")

    # Pub/sub channel on which gateways and workers of the release before send these messages to all workers.
    wake_all = Name("wake")

    # Events -----------------------------------------------------------------------------------------------

    # One stream per gateway. It exists while the gateway listens.
    events = Name("events:")

    # One number per gateway, which grows with every heartbeat of the gateway. Workers drop the requests of a gateway
    # whose number does not change any more.
    gateway_beat = Name("gateway:")

    # Workers ----------------------------------------------------------------------------------------------

    # Set of announced worker ids. A reader removes the ids whose hash has expired.
    workers = Name("workers")

    # Hash: the newest beat (msgpack `Beat`) of each announced worker, for all who only watch whether it is alive.
    beats = Name("workers:beats")

    # Counter: the workers whose heartbeats stopped without a withdrawal, since the store has had its data.
    workers_lost = Name("workers:lost")

    # One hash per live worker: status (msgpack `WorkerStatus`), sla (JSON, deflated), incarnation, and metrics (empty:
    # earlier versions read it).
    worker = Name("worker:")

    # One string per worker that starts and does not serve yet (msgpack `WorkerStart`), and the set of their ids. Both
    # live for `START_TTL_S` after the last report.
    start = Name("starting:")
    starting = Name("starting")

    # Tiers ------------------------------------------------------------------------------------------------

    # A hash. `generation` is the last number given to a document. `in_force` is the document that all gateways and
    # workers follow (msgpack `TierDocument`). The hash outlives these processes; the first process of the next start
    # replaces the document with its own file, and so does one with a newer file, if all agree.
    tiers = Name("tiers")

    # The proposed document, if there is one. Only one document can be proposed at a time, and it expires soon.
    tiers_proposed = Name("tiers:proposed")

    # Pub/sub channel: a message of any content means that one of the two keys above has changed.
    tiers_news = Name("tiers:news")

    # Set of the gateways and workers that follow the tiers. Each of them also has a key (msgpack `Follower`), which
    # lives longer than a few missed reports.
    followers = Name("followers")
    follower = Name("follower:")

    # Writes -------------------------------------------------------------------------------------------

    # A key that is written just before WAITAOF, which waits only for the writes of its own connection. This write comes
    # after all earlier writes of any connection, so when it is on disk, they are too.
    durable = Name("durable")

    # A key that gateways write every second, to learn whether the store takes writes.
    probe = Name("probe")

    @property
    def tasks(self) -> "TaskKeys":
        return TaskKeys(self.prefix + "tasks:")


class TaskKeys(Keys):
    """The keys of tasks. Their queue has the same keys as that of requests: `tidegate:tasks:queue:realtime` and so on.

    A queue's name is a lane (scheduler/drivers/calls/lanes.py), and a request's payload is a msgpack `Task` without its
    input. That is the field `input`, because only a worker reads it. `bytes` is the size of both when it was created.
    """

    # Hash: bytes of the waiting and running tasks of each owner.
    bytes = Name("bytes")

    # One hash per ended task. Fields: task (msgpack `Task`), state, attempt, ended_ms, and result (JSON) or error; a
    # dead letter also has input and bytes. Its TTL is the task's `keep_ms`, or `DEAD_TTL_S` for a dead letter.
    ended = Name("ended:")

    # One sorted set per owner: `<id>:<bytes>` of the dead letters, by the time of their end in ms.
    dead = Name("dead:")
    dead_bytes = Name("dead-bytes:")  # the sum of their bytes

    # Pub/sub channel: the ids of ended tasks, with blanks between them.
    news = Name("ended")
