"""Attacks without a key: what they send is answered or cut off, and what their measurement says."""

import asyncio
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from bench.chaos import door
from tests.gateway.stand import serving_stand


@pytest.mark.parametrize("name", [name for name, attack in door.ATTACKS.items() if attack is not door.tiny_chunks])
async def test_an_attack_ends_and_leaves_the_server_at_work(name: str, redis_client: Redis) -> None:
    async with serving_stand(redis=redis_client) as stand:
        place = urlsplit(stand.url)

        def attack() -> None:
            with suppress(OSError), socket.create_connection((place.hostname or "", place.port or 0), 1.0) as client:
                door.ATTACKS[name](client)

        await asyncio.to_thread(attack)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(door.HEALTH + b"\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()


def test_a_gap_that_grows_by_more_than_the_goal_is_named() -> None:
    calm = [0.01] * 99 + [0.02]
    record: Any = door.door_record({"harmless": (calm, [0.02] * 100), "harmful": (calm, [0.01] * 99 + [0.09])})
    assert [row.cells[3:] for row in record.sections[0].table.rows] == [("10.0", "yes"), ("70.0", "NO")]
