"""A cluster of three: one primary serves a deployment, and clients follow its slot to other nodes."""

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError

from gateway.jobs.batches.store import BatchStore
from scheduler.queue.redis import RedisQueue
from scheduler.store import connection
from scheduler.store.durability import durable
from scheduler.store.errors import STORE_AWAY, StoreRefused, is_of_wrong_node
from scheduler.store.keys import Keys
from tests.scheduler.queue.harness import ManualClock, ids, lease_of, make_request
from tests.scheduler.store.nodes import server_cluster
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
MAX_AWAY_S = 20.0  # about a second is usual; without a retry at the right node, it is for ever, or 30 s


async def test_queue_transactions_and_listeners_follow_the_slot(tmp_path: Path) -> None:
    with server_cluster(tmp_path) as cluster:
        await cluster.start()
        client = connection.connect(cluster.url)
        queue = RedisQueue(client, ManualClock(), "w")
        await queue.put([make_request(name) for name in "abc"])
        [first] = await queue.claim({"realtime": 1}, 5)
        assert (await queue.backlogs(["realtime", "bulk"]))["realtime"].requests == 2  # MULTI
        await asyncio.gather(*(queue.known(["b"]) for _ in range(8)))  # connections that stay on the old node
        reader = connection.blocking(client, 30.0)
        last = await client.xadd(Keys.of(client).events + "g", {"n": 1})
        reading = asyncio.create_task(reader.xread({Keys.of(client).events + "g": last}, block=30_000))

        await cluster.move_slot(Keys.of(client).leases)
        async with asyncio.timeout(MAX_AWAY_S):
            await queue.put([make_request("d")])
            assert await queue.ack([lease_of(first)]) == [True]
            assert ids(await queue.claim({"realtime": 9}, 5)) == ["b", "c", "d"]
            await durable(client, Keys.of(client).leases)
            assert await BatchStore(client).num_unfinished(None) == 0  # keys of several kinds in one command
            await client.xadd(Keys.of(client).events + "g", {"n": 2})
            [(_, entries)] = await reading
        assert [fields for _, fields in entries] == [{b"n": b"2"}]
        await queue.close()
        await reader.aclose()
        await client.aclose()


async def test_nodes_that_the_url_does_not_name_are_learned(tmp_path: Path) -> None:
    with server_cluster(tmp_path, num_spare=1) as cluster:
        await cluster.start()
        [named] = cluster.spare
        client = connection.connect(cluster.url_of(named))
        leases = Keys.of(client).leases
        await client.sadd(leases, "a")
        named.end(signal.SIGKILL)
        cluster.spare.remove(named)
        await cluster.move_slot(leases)
        async with asyncio.timeout(MAX_AWAY_S):
            assert await client.smembers(leases) == {b"a"}
        await client.aclose()


@pytest.mark.parametrize(
    "error",
    [
        MovedError("6335 127.0.0.1:7000"),
        AskError("6335 127.0.0.1:7000"),
        TryAgainError("Multiple keys request during rehashing of slot"),
        ClusterDownError("The cluster is down"),
        ResponseError("Script attempted to access a non local key in a cluster node script: 5, on @user_script:1."),
        ResponseError("Attempted to access a non local key in a cluster node script: on @user_script:1."),
    ],
)
def test_a_node_without_the_keys_is_a_wrong_one(error: Exception) -> None:
    assert is_of_wrong_node(error)


@pytest.mark.full
@pytest.mark.parametrize("names_all", [True, False], ids=["all-named", "primary-named"])
async def test_a_replica_of_the_cluster_takes_over(tmp_path: Path, names_all: bool) -> None:
    with server_cluster(tmp_path, num_spare=1) as cluster:
        await cluster.start()
        [replica], primary = cluster.spare, cluster.primary_of("{tidegate}:leases")
        client = connection.connect(cluster.url if names_all else cluster.url_of(primary))
        replica.ask("CLUSTER", "REPLICATE", primary.ask("CLUSTER", "MYID"))
        await until(lambda: replica.ask("INFO", "replication")["master_link_status"] == "up")
        queue = RedisQueue(client, ManualClock(), "w")
        await queue.put([make_request("a")])
        await replica.has_all_of(primary)
        primary.send(signal.SIGKILL)
        async with asyncio.timeout(2 * MAX_AWAY_S):
            while True:
                with contextlib.suppress(*STORE_AWAY):
                    assert ids(await queue.claim({"realtime": 1}, 5)) == ["a"]
                    break
        assert replica.ask("ROLE")[0] == b"master"
        await queue.close()
        await client.aclose()


@pytest.mark.full
async def test_the_url_of_one_node_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRIES", 1)
    with server_cluster(tmp_path) as cluster:
        await cluster.start()
        for node in cluster.nodes:
            async with connection.connect(node.valkey.url) as client:
                with pytest.raises(StoreRefused, match=r"redis\+cluster://"):
                    await client.mget(["tidegate:a", "tidegate:b"])
