"""The errors of a store that does not answer, or that answers and refuses to write.

A store refuses writes when its memory or disk is full, or when it is not the primary of the keys. Knows the error codes
of Redis and Valkey. Does not know who writes what: `scheduler.store.connection` turns these codes into `StoreRefused`
for all commands, pipelines and scripts.
"""

import re

import msgspec
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
    TryAgainError,
)

# Raised by a command while the store is not reachable, refuses writes (`StoreRefused`), or does not answer in time.
# A later attempt may succeed. Except after a refusal, the command may have been executed.
STORE_AWAY = (ConnectionError, TimeoutError)

# The cause of each error code, as the end of the sentence "The store refuses writes: …".
CAUSES = {
    "OOM": "its memory is full",
    "MISCONF": "it cannot write to its disk",
    "READONLY": "it is a read-only replica",
    "UNBLOCKED": "it has just become a replica",
    "NOREPLICAS": "too few of its replicas are connected",
    "LOADING": "it is still loading its data",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "BUSY": "it is busy with a script",
    "MOVED": "it is a node of a cluster that does not have the keys (the URL of a cluster begins with redis+cluster://)",
    "ASK": "its cluster is moving the keys to another node",
    "CLUSTERDOWN": "its cluster is down",
    "CROSSSLOT": "it is a node of a cluster (the URL of a cluster begins with redis+cluster://)",
}
# Codes of a node that is not the primary: the connection, or the name that it was opened with, leads to the wrong node.
NOT_PRIMARY = frozenset({"READONLY", "UNBLOCKED", "MASTERDOWN", "MOVED", "ASK", "CLUSTERDOWN"})
# redis-py removes the codes of these errors from their messages.
_CODES = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    MovedError: "MOVED",
    AskError: "ASK",
    TryAgainError: "ASK",
    ClusterCrossSlotError: "CROSSSLOT",
}
# What a script gets in place of MOVED and ASK, in Valkey and in Redis.
_NOT_LOCAL = "ttempted to access a non local key in a cluster node"
# In a pipeline, redis-py puts the command in front of the server's message.
_CODE = re.compile(r"(?:\A|of pipeline caused error: (?:\(')?)(MISCONF|NOREPLICAS|UNBLOCKED|BUSY) ")


# Raised by msgspec for what it cannot decode: damaged, or written by a version with other types.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class StoreRefused(ConnectionError):
    """The store answers, but takes no writes. `cause` says why. Nothing was written, and a later attempt may succeed.

    It is a `ConnectionError`, because whoever can wait for a store that is away can also wait for this one.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"The store refuses writes: {cause}.")
        self.cause = cause


class NotDurable(StoreRefused):
    """The store has taken a write, but has not confirmed in time that it is on its disk, or has lost it since."""

    def __init__(self, cause: str = "its disk is too slow or full") -> None:
        super().__init__(cause)


def refusal_of(error: Exception) -> StoreRefused | None:
    """Return the refusal that an error of redis-py means; None if it means something else."""
    code = _code_of(error)
    return None if code is None else StoreRefused(CAUSES[code])


def is_of_wrong_node(error: Exception) -> bool:
    """Return whether an error of redis-py comes from a node that is not the primary."""
    return _code_of(error) in NOT_PRIMARY


def _code_of(error: Exception) -> str | None:
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    if code is None and (found := _CODE.search(str(error))):
        code = found[1]
    return "MOVED" if code is None and _NOT_LOCAL in str(error) else code
