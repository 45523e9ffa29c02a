"""Files of people with mistakes: each is named with its line, and nothing but `YamlFault` is raised."""

from pathlib import Path

import pytest

from scheduler.yaml_file import YamlFault, parse_yaml, read_yaml

MISTAKES = [
    ("a: 1\nb: [", "not YAML: line 2: expected the node content, but found '<stream end>'"),
    ("a: 1\nb:\n  c: 1\n  c: 2\n", "not YAML: line 4: the key 'c' stands twice"),
    ("a: 1\nb: *c\n", "not YAML: line 2: found undefined alias 'c'"),
    ("a: !secret b\n", "not YAML: line 1: could not determine a constructor for the tag '!secret'"),
    ("a: \0", "not YAML"),
    ("day: 2024-13-45", "not YAML: month must be in 1..12"),
    ("[" * 5000, "not YAML: it is nested too deeply"),
]


@pytest.mark.parametrize(("text", "fault"), MISTAKES)
def test_a_mistake_is_said_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(YamlFault) as raised:
        parse_yaml(text)
    assert str(raised.value) == fault


@pytest.mark.parametrize(("text", "fault"), MISTAKES)
def test_of_a_text_with_secrets_only_the_line_is_said(text: str, fault: str) -> None:
    with pytest.raises(YamlFault) as raised:
        parse_yaml(text, has_secrets=True)
    assert fault.startswith(str(raised.value))
    assert not any(secret in str(raised.value) for secret in ("alias 'c'", "!secret", "month"))


def test_a_key_that_stands_twice_is_named_beside_secrets() -> None:
    with pytest.raises(YamlFault, match=r"^not YAML: line 2: the key 'port' stands twice$"):
        parse_yaml("port: 1\nport: 2\n", has_secrets=True)


def test_merged_keys_may_be_given_again() -> None:
    text = "base: &base {a: 1, b: 2}\nmore: &more {c: 3}\nfull:\n  <<: *base\n  <<: *more\n  a: 4\n"
    assert parse_yaml(text)["full"] == {"a": 4, "b": 2, "c": 3}


def test_a_file_is_named(tmp_path: Path) -> None:
    for name, content, fault in [
        ("broken", b"[", ": not YAML: line 1: "),
        ("latin", b"\xff", ": not UTF-8"),
        ("missing", None, ": No such file or directory"),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(YamlFault, match=f"^{path}{fault}"):
            read_yaml(path)
    (tmp_path / "fine").write_text("a: [1]\n")
    assert read_yaml(tmp_path / "fine") == {"a": [1]}
