"""`add_key` and `revoke_key`: what they leave in the file, and that readers never see a part of it."""

import hashlib
import os
import stat
import threading
from pathlib import Path

import pytest

from gateway.keys.edit import add_key, revoke_key
from gateway.keys.file import KeyringError, read_entries, read_file
from tests.gateway.stand import make_tiers

TIERS = make_tiers()
BLOCK = """\
# Keys of the chat team. Ask Kim.
keys:
  # the web page
  - {name: web, key: sk-web, tiers: [realtime]}  # public
  # the nightly run
  - name: nightly
    sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
    tiers:
      - bulk
  # the end
"""
FLOW = "# top\nkeys: [{name: web, key: sk-web}, {name: nightly, key: sk-n}] # all\n"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_new_file_is_private_and_holds_only_the_digest(path: Path) -> None:
    secret = add_key(path, "chat-ui", {"tiers": ["realtime"], "requests_per_minute": 60}, TIERS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.startswith("sk-") and len(secret) > 40
    assert secret not in path.read_text()
    [entry] = read_entries(path)
    assert (entry.sha256, entry.tiers, entry.requests_per_minute) == (digest(secret), ["realtime"], 60)
    assert list(path.parent.iterdir()) == [path], "no other file is left"


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_gets_its_first_key_and_keeps_its_mode(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o640)
    add_key(path, "web", {}, TIERS)
    assert [entry.name for entry in read_entries(path)] == ["web"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_in_another_encoding_is_refused(path: Path) -> None:
    path.write_bytes("# für Kim\nkeys: []\n".encode("latin-1"))
    with pytest.raises(KeyringError, match=r"keys.yaml: not UTF-8"):
        add_key(path, "web", {}, TIERS)


def test_comments_stay_where_keys_have_lines_of_their_own(path: Path) -> None:
    path.write_text(BLOCK)
    add_key(path, "new", {}, TIERS)
    revoke_key(path, "web")
    kept = [line for line in BLOCK.splitlines() if "sk-web" not in line]
    assert [line for line in path.read_text().splitlines() if "name: new" not in line] == kept


@pytest.mark.parametrize("text", [BLOCK, FLOW])
def test_projects_and_prices_stay(path: Path, text: str) -> None:
    path.write_text(text + "projects: [{name: p, budget: {tokens_per_day: 9}}]\nprices:\n  - {input: 1, output: 2}\n")
    before = read_file(path)
    add_key(path, "new", {"project": "p"}, TIERS)
    revoke_key(path, "web")
    after = read_file(path)
    assert (after.projects, after.prices) == (before.projects, before.prices)
    assert [entry.name for entry in after.keys] == ["nightly", "new"]


@pytest.mark.parametrize("text", [BLOCK, FLOW])
def test_a_key_is_revoked_by_name_or_by_id(path: Path, text: str) -> None:
    path.write_text(text)
    web, nightly = read_entries(path)
    assert revoke_key(path, web.id) == [web]
    assert read_entries(path) == [nightly]
    assert revoke_key(path, "nightly") == [nightly]
    assert read_entries(path) == []
    assert path.read_text().startswith("# ")


def test_a_rotated_key_has_two_secrets_until_one_is_revoked(path: Path) -> None:
    first = add_key(path, "web", {"tiers": ["bulk"], "tokens_per_minute": 9}, TIERS)
    second = add_key(path, "web", {}, TIERS, rotate=True)
    entries = read_entries(path)
    assert [e.sha256 for e in entries] == [digest(first), digest(second)]
    assert entries[0].options == entries[1].options
    revoke_key(path, entries[0].id)
    assert read_entries(path) == [entries[1]]


@pytest.mark.parametrize(
    ("name", "options", "rotate", "message"),
    [
        ("web", {}, False, "there is a key 'web' already"),
        ("other", {}, True, "no key 'other' to rotate"),
        ("new", {"tiers": ["gold"]}, False, "there is no tier 'gold'"),
        ("new", {"requests_per_minute": 0}, False, "requests_per_minute"),
    ],
)
def test_a_refused_edit_leaves_the_file_alone(
    path: Path, name: str, options: dict[str, object], rotate: bool, message: str
) -> None:
    path.write_text(FLOW)
    with pytest.raises(KeyringError, match=message):
        add_key(path, name, options, TIERS, rotate=rotate)
    with pytest.raises(KeyringError, match="no key with the name or id 'nobody'"):
        revoke_key(path, "nobody")
    assert path.read_text() == FLOW
    assert os.listdir(path.parent) == [path.name]


def test_edits_at_the_same_time_wait_for_each_other(path: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(path, f"k{n}", {}, TIERS)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.name for entry in read_entries(path)) == [f"k{n}" for n in range(8)]
