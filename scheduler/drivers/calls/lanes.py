"""Lanes: the queues in which the tasks of a tier wait, and how many of them share a call.

A tier's main lane has the tier's own name. A task whose call failed as a whole waits for its next try in an isolated
lane: one bad item fails a whole batch, so the next try is a call with fewer items, and the last try is a call of its
own. In this way, at most a few calls are spent on a bad item, and no good item ends with it.
"""

import math

MAX_TRIES = 3  # a task that has failed so often becomes a dead letter


def isolated_lane(tier: str, attempt: int) -> str:
    """Return the lane in which a task of `tier` waits for its try number `attempt` (2 or more)."""
    return f"{tier}.{attempt}"


def isolated_lanes(tier: str) -> list[str]:
    """Return the isolated lanes of `tier`; that of the last try is first."""
    return [isolated_lane(tier, attempt) for attempt in range(MAX_TRIES, 1, -1)]


def tier_of(lane: str) -> str:
    return lane.partition(".")[0]  # names of tiers contain no dot


def group_size(lane: str, batch: int) -> int:
    """Return the largest number of tasks of `lane` in one call.

    It falls from the whole batch at the first try by equal factors to 1 at the last try: 64, 8, 1.
    """
    attempt = int(lane.partition(".")[2] or 1)
    share = (MAX_TRIES - attempt) / (MAX_TRIES - 1)
    return max(1, round(math.pow(batch, share)))
