"""Failovers that lose claims: no fence is given twice, so no two workers hold one request."""

import pytest

from scheduler.queue.redis import RedisQueue
from scheduler.store import connection
from tests.scheduler.queue.harness import ManualClock, lease_of, make_request
from tests.scheduler.store.nodes import Pair

LOST = 50  # claims; the clock stands still, so that their numbers outrun it


@pytest.mark.timeout(60)
async def test_fences_grow_over_failovers_that_lose_claims(pair: Pair, clock: ManualClock) -> None:
    fences: list[int] = []
    for number in range(2):
        ours, theirs = connection.connect(pair.primary.valkey.url), connection.connect(pair.replica.valkey.url)
        old, new = RedisQueue(ours, clock, "old"), RedisQueue(theirs, clock, "new")
        requests = [make_request(f"{number}-{n}") for n in range(LOST)]
        await old.put(requests)
        await pair.replica.has_all_of(pair.primary)
        pair.part()
        lost = await old.claim({"realtime": LOST}, 5.0)
        claimed = await new.claim({"realtime": LOST}, 5.0)
        assert len(lost) == len(claimed) == LOST
        assert min(c.fence for c in lost) > max(fences, default=0)
        assert min(c.fence for c in claimed) > max(c.fence for c in lost)
        fences += [c.fence for c in (*lost, *claimed)]
        await pair.demote()
        assert not any(await new.renew([lease_of(c) for c in lost], 5.0))
        assert all(await new.ack([lease_of(c) for c in claimed]))
        for queue, client in ((old, ours), (new, theirs)):
            await queue.close()
            await client.aclose()
