"""Edits of the file of API keys, for `tidegate keys`.

An edit replaces the whole file at once, and two edits at the same time wait for each other. Comments stay where each
key has lines of its own, as in the example of docs/tiers.md; in another layout, only those at the file's top stay.
ruamel.yaml would keep them in any layout, but is not worth a dependency for two commands.
"""

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from gateway.keys.file import KeyEntry, KeyringError, parse_entries
from scheduler.config import TierSet

SECRET_BYTES = 32  # of randomness in a new key: far too many to guess, so that one round of SHA-256 suffices
NEW_FILE_MODE = 0o600


def add_key(path: Path, name: str, options: dict[str, Any], tiers: TierSet, *, rotate: bool = False) -> str:
    """Add a new random key to the file, and return the key. The file gets only its digest.

    With `rotate`, the key `name` gets one more secret and keeps its options; otherwise the name must be new. The file
    is made if it does not exist. Raises `KeyringError` if the file or an option is invalid.
    """
    secret = new_secret()

    def add(text: str) -> str:
        same = [entry for entry in parse_entries(path, text) if entry.name == name]
        if rotate and not same:
            raise KeyringError(f"{path}: there is no key {name!r} to rotate")
        if same and not rotate:
            raise KeyringError(f"{path}: there is a key {name!r} already; --rotate adds a second secret to it")
        kept = same[0].options if rotate else {"name": name} | options
        return _with_item(text, kept | {"sha256": hashlib.sha256(secret.encode()).hexdigest()})

    _edit(path, add, tiers)
    return secret


def new_secret() -> str:
    return f"sk-{secrets.token_urlsafe(SECRET_BYTES)}"


def revoke_key(path: Path, name_or_id: str) -> list[KeyEntry]:
    """Remove the key of this name with all its secrets, or the one secret with this id. Return the removed entries.

    Raises `KeyringError` if there is none.
    """
    removed: list[KeyEntry] = []

    def revoke(text: str) -> str:
        entries = parse_entries(path, text)
        removed[:] = [e for e in entries if e.name == name_or_id] or [e for e in entries if e.id == name_or_id]
        if not removed:
            raise KeyringError(f"{path}: there is no key with the name or id {name_or_id!r}")
        edited = _without_items(text, [n for n, entry in enumerate(entries) if entry in removed])
        if parse_entries(path, edited) != [entry for entry in entries if entry not in removed]:
            raise KeyringError(f"{path}: this layout cannot be edited; remove the key by hand")
        return edited

    _edit(path, revoke, None)
    return removed


def _edit(path: Path, change: Callable[[str], str], tiers: TierSet | None) -> None:
    """Replace the file by `change(its text)`. Readers see the old file or the new one, never a part of it."""
    path = path.resolve()  # the target of a link is replaced, not the link
    try:
        with _locked(path.parent):
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            edited = change(text if text.strip() else "keys: []\n")
            parse_entries(path, edited, tiers)
            _replace(path, edited)
    except OSError as error:
        raise KeyringError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyringError(f"{path}: not UTF-8") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Replace the file at once. An existing file keeps its mode and, where this process may set it, its owner."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            old = path.stat() if path.exists() else None
            os.fchmod(descriptor, old.st_mode & 0o777 if old else NEW_FILE_MODE)
            with suppress(PermissionError):
                os.fchown(descriptor, *((old.st_uid, old.st_gid) if old else (-1, -1)))
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _with_item(text: str, item: dict[str, Any]) -> str:
    sequence = _sequence(text)
    if sequence is None:
        return _rewritten(text, lambda items: [*items, item])
    lines = text.splitlines()
    lines.insert(_last_line(sequence) + 1, f"{' ' * sequence.start_mark.column}- {_flow(item)}")
    return "\n".join(lines) + "\n"


def _without_items(text: str, gone: Sequence[int]) -> str:
    sequence = _sequence(text)
    if sequence is None or len(sequence.value) == len(gone):
        return _rewritten(text, lambda items: [item for n, item in enumerate(items) if n not in gone])
    nodes = [sequence.value[n] for n in gone]
    cut = {line for node in nodes for line in range(node.start_mark.line, _last_line(node) + 1)}
    return "".join(line + "\n" for n, line in enumerate(text.splitlines()) if n not in cut)


def _rewritten(text: str, change: Callable[[list[Any]], list[Any]]) -> str:
    """Return the file with the changed keys, one in each line. Of its comments, only those at the top are kept."""
    content = yaml.safe_load(text)
    lines = text.splitlines()
    num_top = next((n for n, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    sections = content | {"keys": change(content["keys"])}
    body = [line for name, items in sections.items() for line in _section(name, items)]
    return "\n".join([*lines[:num_top], *body]) + "\n"


def _section(name: str, items: list[Any]) -> list[str]:
    return [f"{name}:", *(f"  - {_flow(item)}" for item in items)] if items else [f"{name}: []"]


def _flow(item: dict[str, Any]) -> str:
    """Return the item as one line of YAML."""
    return yaml.safe_dump(item, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**20).strip()


def _sequence(text: str) -> Any:
    """Return the YAML node of the keys; None if they do not stand on lines of their own."""
    root: Any = yaml.compose(text)
    node = next(value for name, value in root.value if name.value == "keys")
    return None if node.flow_style or not node.value else node


def _last_line(node: Any) -> int:
    """Return the line on which `node` ends. The end mark of a block lies behind the comments that follow it."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style:
        return int(node.end_mark.line)
    last = node.value[-1]
    return _last_line(last[1] if isinstance(last, tuple) else last)
