"""Keys, and which tier they get for which `service_tier`."""

import hashlib
from pathlib import Path

import pytest

from gateway.identity import ApiKey, Keyring, resolve_tier
from gateway.protocol.errors import ApiError
from scheduler.config import load_tiers, parse_tiers
from tests.gateway.stand import TIERS

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


def test_an_unknown_service_tier_is_refused() -> None:
    with pytest.raises(ApiError) as error:
        resolve_tier("platinum", None, SHIPPED)
    assert (error.value.status, error.value.param, error.value.code) == (400, "service_tier", "invalid_value")


def test_load_and_authenticate(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n"
        "  - {name: one, key: sk-one, tiers: [bulk], default_tier: bulk}\n"
        f"  - {{name: two, sha256: {digest}}}\n"
    )
    keyring = load_keyring(path, SHIPPED)
    assert not keyring.is_open
    one, two = keyring.authenticate("Bearer sk-one"), keyring.authenticate("bearer sk-two")
    assert one is not None and two is not None
    assert (one.name, one.tiers, one.default_tier) == ("one", frozenset({"bulk"}), "bulk")
    assert (two.name, two.tiers, two.default_tier) == ("two", None, None)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer sk-on", "Basic sk-one", "sk-one", "é é"])
def test_everything_else_is_401(header: str | None) -> None:
    keyring = Keyring([ApiKey("one", hashlib.sha256(b"sk-one").digest())])
    with pytest.raises(ApiError) as error:
        keyring.authenticate(header)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


def test_no_keys_means_open_access() -> None:
    assert Keyring().authenticate(None) is None
    assert Keyring().authenticate("Bearer whatever") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "'keys'"),
        ("keys: [{name: a}]", "'keys[0]': needs either key or sha256"),
        ("keys: [{name: a, key: b, sha256: c}]", "'keys[0].sha256'"),
        ("keys: [{name: a, key: b, colour: c}]", "'keys[0].colour'"),
        ("keys: [{name: a, key: b, tiers: [gold]}]", "key 'a': there is no tier 'gold'"),
        ("keys: [{name: a, key: b, tiers: [bulk], default_tier: batch}]", "default_tier is not among its tiers"),
        ("keys: [", "not YAML"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeyringError) as error:
        load_keyring(path, parse_tiers(TIERS))
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match=r"keys\.yaml: No such file"):
        load_keyring(tmp_path / "keys.yaml", SHIPPED)
