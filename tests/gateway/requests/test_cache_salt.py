"""Requests of two keys never share cached KV."""

from typing import Any

from gateway.identity import Keyring, cache_salt
from gateway.requests.prepare.placement import Placement
from tests.gateway.api_keys import key
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.gateway.tiny_model import MODEL

HI: Any = [{"role": "user", "content": "hi"}]
KEYS = Keyring([key(name) for name in ("alice", "bob")])


async def salt_of(stand: Stand, name: str, requested: str | None = None) -> str:
    """Return the salt with which a chat of this key reaches the worker."""
    client = stand.client.with_options(api_key=f"sk-{name}")
    body = None if requested is None else {"cache_salt": requested}
    await client.chat.completions.create(model=MODEL, messages=HI, extra_body=body)
    return stand.worker.served[-1].cache_salt


async def test_a_body_can_leave_the_cache_of_its_key_but_not_join_another_keys() -> None:
    async with running_stand(keyring=KEYS) as stand:
        salts = [await salt_of(stand, name, requested) for name in ("alice", "bob") for requested in (None, "x", "y")]
        assert len(set(salts)) == 6
        assert await salt_of(stand, "alice", "x") == salts[1]


async def test_lines_of_a_batch_share_with_the_other_requests_of_their_key() -> None:
    async with running_stand(keyring=KEYS) as stand:
        alice = await salt_of(stand, "alice")
        line = {"model": MODEL, "prompt": "hi"}
        placement = Placement(make_tiers()["batch"], "flex", "req_1", "alice")
        await stand.gateway.completions.complete("/v1/completions", line, placement)
        assert stand.worker.served[-1].cache_salt == alice


def test_no_two_pairs_of_key_and_body_salt_give_the_same_salt() -> None:
    pairs = [
        (None, None),
        ("", None),
        (None, ""),
        ("a", "b"),
        ("ab", None),
        (None, "ab"),
        ('a", "b', None),
        ("null", None),
    ]
    assert len({cache_salt(owner, requested) for owner, requested in pairs}) == len(pairs)
