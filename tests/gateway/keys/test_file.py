"""The file of API keys: what it may contain, and what is said of a bad one."""

import hashlib
from pathlib import Path

import pytest

from gateway.identity import Keyring
from gateway.keys.file import KeyringError, read_entries
from tests.gateway.stand import make_tiers


def test_load_and_authenticate(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n"
        "  - {name: one, key: sk-one, tiers: [bulk], default_tier: bulk}\n"
        f"  - {{name: two, sha256: {digest}}}\n"
    )
    keyring = Keyring([entry.to_key() for entry in read_entries(path, make_tiers())])
    assert not keyring.is_open
    one, two = keyring.authenticate("Bearer sk-one"), keyring.authenticate("bearer sk-two")
    assert one is not None and two is not None
    assert (one.name, one.tiers, one.default_tier) == ("one", frozenset({"bulk"}), "bulk")
    assert (two.name, two.tiers, two.default_tier) == ("two", None, None)


def test_limits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: b, requests_per_minute: 3, tokens_per_minute: 500, concurrent_requests: 2}]")
    [key] = [entry.to_key() for entry in read_entries(path)]
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests) == (3, 500, 2)
    assert key.is_limited


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: {}", "'keys'"),
        ("", "must have the form `keys: [{name: …"),
        ("keys: [{name: a}]", "'keys[0]': needs either key or sha256"),
        ("keys: [{name: a, key: b, sha256: c}]", "'keys[0].sha256'"),
        ("keys: [{name: a, key: b, colour: c}]", "'keys[0].colour'"),
        ("keys: [{name: a, key: b, tiers: [gold]}]", "key 'a': there is no tier 'gold'"),
        ("keys: [{name: a, key: b, tiers: [bulk], default_tier: batch}]", "default_tier is not among its tiers"),
        ("keys: [{name: a, key: b, requests_per_minute: 0}]", "'keys[0].requests_per_minute'"),
        ("keys: [{name: a, key: b}, {name: a, key: c, admin: true}]", "key 'a': its entries differ"),
        ("keys: [{name: a, key: b}, {name: c, key: b}]", "two entries have the same secret"),
        ("keys: [", "not YAML"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeyringError) as error:
        read_entries(path, make_tiers())
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match=r"keys\.yaml: No such file"):
        read_entries(tmp_path / "keys.yaml")


def test_the_keys_file_names_the_administrators(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: root, key: sk-root, admin: true}, {name: user, key: sk-user}]")
    keyring = Keyring([entry.to_key() for entry in read_entries(file)])
    [root, user] = [keyring.authenticate(f"Bearer sk-{name}") for name in ("root", "user")]
    assert root is not None and root.admin
    assert user is not None and not user.admin
    file.write_text("keys: [{name: root, key: sk-root, admin: sure}]")
    with pytest.raises(KeyringError, match=r"keys\[0\]\.admin"):
        read_entries(file)
