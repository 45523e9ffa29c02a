"""The file of API keys: what it may contain, and what is said of a bad one."""

import hashlib
from pathlib import Path

import pytest

from gateway.identity import Budget, Keyring, KeyWebhook, Project
from gateway.keys.edit import add_key
from gateway.keys.file import KeyringError, read_entries, read_file
from gateway.keys.prices import Price
from tests.gateway.stand import make_tiers

WEBHOOK = KeyWebhook("whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=", "https://example.com/hook")


def test_load_and_authenticate(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n"
        "  - {name: one, key: sk-one, tiers: [bulk], default_tier: bulk}\n"
        f"  - {{name: two, sha256: {digest}, weight: 4, batch_concurrent_lines: 8, batch_enqueued_tokens: 20}}\n"
    )
    keyring = Keyring([entry.to_key() for entry in read_entries(path, make_tiers())])
    assert not keyring.is_open
    one, two = keyring.authenticate("Bearer sk-one"), keyring.authenticate("bearer sk-two")
    assert one is not None and two is not None
    assert (one.name, one.tiers, one.default_tier) == ("one", frozenset({"bulk"}), "bulk")
    assert (two.name, two.tiers, two.default_tier) == ("two", None, None)
    assert (two.weight, two.batch_concurrent_lines, two.batch_enqueued_tokens) == (4, 8, 20)


def test_the_older_name_of_the_weight_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: b, batch_weight: 4}]")
    assert [entry.to_key().weight for entry in read_entries(path)] == [4]


def test_projects_budgets_and_prices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{name: a, key: b, project: p, budget: {tokens_per_day: 5}}]\n"
        "projects: [{name: p, requests_per_minute: 7, budget: {cost_per_month: 2.5}}]\n"
        "prices: [{tier: bulk, input: 1, output: 2.5}]\n"
    )
    file = read_file(path)
    [one] = file.to_keys()
    assert one.budget == Budget(tokens_per_day=5)
    assert one.project == Project("p", requests_per_minute=7, budget=Budget(cost_per_month=2.5))
    assert [entry.to_price() for entry in file.prices] == [Price(1, 2.5, tier="bulk")]


def test_webhooks_are_read_and_a_rotation_keeps_them(tmp_path: Path) -> None:
    path, webhook = tmp_path / "keys.yaml", f"{{secret: {WEBHOOK.secret}, url: '{WEBHOOK.url}'}}"
    path.write_text(f"keys: [{{name: a, key: b, webhook: {webhook}}}]")
    add_key(path, "a", {}, make_tiers(), rotate=True)
    assert [entry.to_key().webhook for entry in read_entries(path)] == [WEBHOOK, WEBHOOK]


def test_a_bad_secret_of_a_webhook_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: b, webhook: {secret: letmein}}]")
    with pytest.raises(KeyringError, match="openssl rand") as error:
        read_entries(path)
    assert "letmein" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: {}", "'keys'"),
        ("keys: [{name: a, key: b, webhook: {url: 'https://example.com'}}]", "'keys[0].webhook.secret'"),
        (f"keys: [{{name: a, key: b, webhook: {{secret: {WEBHOOK.secret}, url: x}}}}]", "'keys[0].webhook.url'"),
        ("", "must have the form `keys: [{name: …"),
        ("keys: [{name: a}]", "'keys[0]': needs either key or sha256"),
        ("keys: [{name: a, key: b, sha256: c}]", "'keys[0].sha256'"),
        ("keys: [{name: a, key: b, colour: c}]", "'keys[0].colour'"),
        ("keys: [{name: a, key: b, tiers: [gold]}]", "key 'a': there is no tier 'gold'"),
        ("keys: [{name: a, key: b, tiers: [bulk], default_tier: batch}]", "default_tier is not among its tiers"),
        ("keys: [{name: a, key: b, requests_per_minute: 0}]", "'keys[0].requests_per_minute'"),
        ("keys: [{name: a, key: b, weight: 0}]", "'keys[0].weight'"),
        ("keys: [{name: a, key: b, role: root}]", "'keys[0].role'"),
        ("keys: [{name: a, key: b, admin: true, role: read}]", "admin: true is the role admin"),
        ("keys: [{name: a, key: b}, {name: a, key: c, admin: true}]", "key 'a': its entries differ"),
        ("keys: [{name: a, key: b}, {name: c, key: b}]", "two entries have the same secret"),
        ("keys: [{name: a, key: b, budget: {tokens_per_day: 0}}]", "'keys[0].budget.tokens_per_day'"),
        ("keys: [{name: a, key: b, budget: {cost_per_day: 4.0e-10}}]", "'keys[0].budget.cost_per_day'"),
        ("keys: [{name: a, key: b, budget: {cost_per_day: .nan}}]", "'keys[0].budget.cost_per_day'"),
        ("keys: [{name: a, key: b, budget: {cost_per_day: 1}}]", "key 'a': a budget of cost needs `prices`"),
        ("keys: [{name: a, key: b, project: p}]", "key 'a': there is no project 'p'"),
        (
            "{keys: [{name: a, key: b, project: p}], projects: [{name: p, budget: {cost_per_month: 1}}]}",
            "key 'a': a budget of cost needs `prices`",
        ),
        ("{keys: [], projects: [{name: p}, {name: p}]}", "two projects have the same name"),
        ("{keys: [], prices: [{input: -1, output: 1}]}", "'prices[0].input'"),
        ("keys:\n  - {name: a, key: sk-secret", "not YAML: line 2"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeyringError) as error:
        read_entries(path, make_tiers())
    assert message in str(error.value)
    assert str(path) in str(error.value) and "sk-secret" not in str(error.value)
