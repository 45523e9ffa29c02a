"""What the server says of itself: how full its memory is, and which replicas follow it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

MAX_SILENT_S = 10  # seconds; a replica confirms every second, and one that is silent for longer does not follow


@dataclass(frozen=True, slots=True)
class StoreState:
    """`memory_limit` is `maxmemory`, or all memory of the server's machine where that is not set (0: not known)."""

    memory_bytes: int
    memory_limit_bytes: int
    replicas: int  # that follow
    replica_lag_bytes: int | None  # of the newest writes, what the slowest of these does not have; None: none follows


async def read_state(client: Redis) -> StoreState:
    """Ask the server. Raises the store's errors, also if its user may not use INFO."""
    pipeline = client.pipeline(transaction=False)
    pipeline.info("memory")
    pipeline.info("replication")
    memory, replication = await pipeline.execute()
    following = _following(replication)
    lags = [int(replication["master_repl_offset"]) - int(replica["offset"]) for replica in following]
    return StoreState(
        memory_bytes=int(memory["used_memory"]),
        memory_limit_bytes=int(memory.get("maxmemory") or memory.get("total_system_memory") or 0),
        replicas=len(following),
        replica_lag_bytes=max(0, *lags) if lags else None,
    )


def _following(replication: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    replicas = [value for name, value in replication.items() if name.startswith("slave") and isinstance(value, dict)]
    return [r for r in replicas if r["state"] == "online" and int(r.get("lag", 0)) <= MAX_SILENT_S]
