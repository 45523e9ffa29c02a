"""`tidegate keys`: add, list and revoke API keys in their file. Running gateways notice the change within a second.

A key is shown once, when it is made: the file has only its SHA-256 digest.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from gateway.identity import ROLES
from gateway.keys.edit import add_key, revoke_key
from gateway.keys.file import KeyEntry, KeyringError, read_entries
from scheduler.config import TierConfigError, load_tiers, shipped_tiers_path

FILE_VARIABLE = "TIDEGATE_API_KEYS"
TIERS_VARIABLE = "TIDEGATE_TIERS"
EX_FAILED = 1


def run_keys(args: list[str]) -> int:
    """Run the subcommand. Return the exit code: 0, or 1 if the file cannot be used."""
    options = _parser().parse_args(args)
    if options.file is None:
        print(f"tidegate keys: which file? Use --file FILE, or set {FILE_VARIABLE}.", file=sys.stderr)
        return 2
    try:
        options.run(options)
    except (KeyringError, TierConfigError) as error:
        print(f"tidegate keys: {error}", file=sys.stderr)
        return EX_FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    file, tiers = os.environ.get(FILE_VARIABLE), os.environ.get(TIERS_VARIABLE)
    common.add_argument(
        "--file", type=Path, default=Path(file) if file else None, help=f"the keys file; default: {FILE_VARIABLE}"
    )
    parser = argparse.ArgumentParser(
        prog="tidegate keys",
        description="Add, list and revoke API keys. Running gateways notice the change within a second.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="add | list | revoke")
    add = actions.add_parser("add", parents=[common], help="make a new key, and print it once")
    add.set_defaults(run=_add)
    add.add_argument("name", help="owner of the key's files, batches and usage")
    add.add_argument("--tier", action="append", dest="tiers", help="a tier that it may use; repeatable; default: all")
    add.add_argument("--default-tier", help="tier of requests that name none")
    add.add_argument("--admin", action="store_true", default=None, help="it may use /admin: the role admin")
    add.add_argument("--role", choices=ROLES, help="it may look at /admin, also operate, or also change the tiers")
    add.add_argument("--requests-per-minute", type=int, metavar="N")
    add.add_argument("--tokens-per-minute", type=int, metavar="N", help="prompt and output tokens")
    add.add_argument(
        "--concurrent-requests", type=int, metavar="N", help="choices (prompts × n) that may be generated at once"
    )
    add.add_argument("--project", help="a project of the file, whose limits it shares")
    add.add_argument("--files-quota-mb", type=int, metavar="MB", help="size of all its files; default: the server's")
    add.add_argument("--batch-weight", type=int, metavar="N", help="share of its batches beside those of other keys")
    add.add_argument("--batch-concurrent-lines", type=int, metavar="N", help="lines of its batches that run at once")
    add.add_argument("--batch-enqueued-tokens", type=int, metavar="N", help="prompt tokens of its unfinished batches")
    add.add_argument("--rotate", action="store_true", help="add a second secret to an existing key, with its options")
    add.add_argument(
        "--tiers-file",
        type=Path,
        default=Path(tiers) if tiers else shipped_tiers_path(),
        help=f"where the tiers are defined; default: {TIERS_VARIABLE}, or the shipped file",
    )
    actions.add_parser("list", parents=[common], help="show names, ids and options").set_defaults(run=_list)
    revoke = actions.add_parser("revoke", parents=[common], help="remove a key with all its secrets, or one secret")
    revoke.set_defaults(run=_revoke)
    revoke.add_argument("name", metavar="name or id", help="an id, as `list` shows it, is that of one secret")
    parser.epilog = "".join(["\n", *(action.format_usage() for action in actions.choices.values())])
    return parser


def _add(options: argparse.Namespace) -> None:
    others = ("file", "run", "name", "rotate", "tiers_file")
    settings: dict[str, Any] = {n: v for n, v in vars(options).items() if n not in others and v is not None}
    if options.rotate and settings:
        raise KeyringError("--rotate keeps the options of the key; it goes with no other")
    secret = add_key(options.file, options.name, settings, load_tiers(options.tiers_file), rotate=options.rotate)
    print(secret)
    print(f"The key {options.name!r} is in {options.file}. It is shown only now: keep it.", file=sys.stderr)


def _list(options: argparse.Namespace) -> None:
    entries = read_entries(options.file)
    rows = [("name", "id", "options"), *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, key_id, text in rows:
        print(f"{name:{widths[0]}}  {key_id:{widths[1]}}  {text}".rstrip())


def _row(entry: KeyEntry) -> tuple[str, str, str]:
    options = {name: value for name, value in entry.options.items() if name not in ("name", "webhook")}
    if entry.webhook is not None:  # its secret is not shown
        options["webhook"] = entry.webhook.url or "by metadata"
    texts = [f"{name}={','.join(value) if isinstance(value, list) else value}" for name, value in options.items()]
    return entry.name, entry.id, " ".join([*texts, *(["in plain text"] if entry.key is not None else [])])


def _revoke(options: argparse.Namespace) -> None:
    for entry in revoke_key(options.file, options.name):
        print(f"revoked: {entry.name} {entry.id}")
