"""Keys, and which tier they get for which `service_tier`."""

import hashlib
from pathlib import Path

import pytest

from gateway.identity import INDEX_BYTES, ApiKey, Keyring, resolve_tier
from gateway.protocol.errors import ApiError
from scheduler.config import load_tiers, parse_tiers

SHIPPED = load_tiers(Path(__file__).parents[2] / "tiers.yaml")
SPLIT = parse_tiers(
    {
        "default_tier": "middle",
        "batch_tier": "night",
        "tiers": {
            "gold": {"priority": 100, "service_tiers": ["gold", "priority", "fast"]},
            "middle": {"priority": 50, "service_tiers": ["default", "auto"]},
            "night": {"priority": 0},
        },
    }
)


def make_key(*tiers: str, default: str | None = None) -> ApiKey:
    return ApiKey("k", b"", frozenset(tiers) if tiers else None, default)


@pytest.mark.parametrize(
    ("asked", "tier", "reported"),
    [
        (None, "middle", "default"),
        ("auto", "middle", "default"),
        ("default", "middle", "default"),
        ("gold", "gold", "priority"),
        ("priority", "gold", "priority"),
        ("fast", "gold", "priority"),
        ("ultrafast", "gold", "priority"),
        ("standard", "middle", "default"),
        ("flex", "middle", "default"),
        ("scale", "middle", "default"),
    ],
)
def test_any_names_of_tiers_work(asked: str | None, tier: str, reported: str) -> None:
    resolved = resolve_tier(asked, None, SPLIT)
    assert (resolved.tier.name, resolved.service_tier) == (tier, reported)


@pytest.mark.parametrize(
    ("key", "asked", "tier", "reported"),
    [
        (make_key("bulk", "batch"), "priority", "bulk", "flex"),
        (make_key("bulk", "batch"), None, "bulk", "flex"),
        (make_key("batch"), "default", "batch", "flex"),
        (make_key("realtime"), "flex", "realtime", "default"),
        (make_key(default="bulk"), None, "bulk", "flex"),
        (make_key(default="bulk"), "auto", "bulk", "flex"),
        (make_key(default="bulk"), "default", "realtime", "default"),
        (make_key(), "flex", "bulk", "flex"),
    ],
)
def test_a_key_is_clamped_to_what_it_may_use(key: ApiKey, asked: str | None, tier: str, reported: str) -> None:
    resolved = resolve_tier(asked, key, SHIPPED)
    assert (resolved.tier.name, resolved.service_tier) == (tier, reported)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer sk-on", "Basic sk-one", "sk-one", "é é"])
def test_everything_else_is_401(header: str | None) -> None:
    keyring = Keyring([ApiKey("one", hashlib.sha256(b"sk-one").digest())])
    with pytest.raises(ApiError) as error:
        keyring.authenticate(header)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


def test_no_keys_at_all_let_nobody_in() -> None:
    with pytest.raises(ApiError) as error:
        Keyring([]).authenticate("Bearer sk-one")
    assert error.value.status == 401


def test_keys_whose_digests_begin_alike_are_told_apart() -> None:
    digest = hashlib.sha256(b"sk-one").digest()
    alike = ApiKey("two", digest[:INDEX_BYTES] + b"x" * 28)
    for keys in ([alike, ApiKey("one", digest)], [ApiKey("one", digest), alike]):
        found = Keyring(keys).authenticate("Bearer sk-one")
        assert found is not None and found.name == "one"
    with pytest.raises(ApiError):
        Keyring([alike]).authenticate("Bearer sk-one")


def test_replaced_keys_are_accepted_no_longer() -> None:
    keyring = Keyring([ApiKey("one", hashlib.sha256(b"sk-one").digest())])
    keyring.replace([ApiKey("two", hashlib.sha256(b"sk-two").digest())])
    assert (keyring.named("one"), keyring.authenticate("Bearer sk-two")) == (None, keyring.named("two"))
    with pytest.raises(ApiError):
        keyring.authenticate("Bearer sk-one")
