"""A GGUF file as a directory of transformers: unpacked once, and kept in the user's cache.

Knows files and processes; does not import torch. Another process reads the file (`engine.native.model.gguf`), so that
its memory is free again and a gateway stays small. So the tokenizer, the chat template and every engine find what they
find in any model's directory.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import structlog

from engine.config import EngineStartError

SUFFIX = ".gguf"
WEIGHTS = "model.safetensors"
TENSORS = "tensors.json"  # where each tensor of the file is: reading the file's own list takes seconds
ROUTER = ".ffn_gate_inp"  # in the names of routers' matrices, which are F32 in every file
ORPHAN_S = 30 * 86_400  # seconds after its last use for which the copy of a file that is gone is kept
_SOURCE = "source.json"  # says of which file a directory was made
_PACKAGES = ("gguf", "accelerate")  # what transformers needs to read such files
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")


def unpacked(file: Path, *, with_weights: bool) -> Path:
    """Return the directory with what `file` has: configuration, tokenizer, chat template, and weights if wanted.

    Raises `EngineStartError` if the file cannot be read, or if a package for it is missing.
    """
    if not file.is_file():
        raise EngineStartError(f"GGUF file {file} does not exist")
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise EngineStartError(f"{file} is no GGUF file: it does not begin with GGUF")
    if _ONE_OF_SEVERAL.search(file.name):
        raise EngineStartError(f"{file} is one part of several: join them with `llama-gguf-split --merge`")
    place = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:12]
    directory = _cache() / f"{file.name.removesuffix(SUFFIX)}-{place}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # gateway and worker may start at the same time
            if not _is_there(file, directory, with_weights):
                remove_orphans(time.time() - ORPHAN_S)
                _unpack(file, directory, with_weights)
    except OSError as error:
        raise EngineStartError(f"{file} cannot be unpacked to {directory}: {error}") from error
    return directory


def source_of(directory: str) -> Path | None:
    """Return the GGUF file of which `unpacked` made `directory`; None if there is none, or none any more."""
    try:
        file = Path(json.loads((Path(directory) / _SOURCE).read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return file if file.is_file() else None


def remove_orphans(before_s: float) -> None:
    """Remove the copies of files that are gone, unless a command has used the copy since `before_s` (Unix time)."""
    for lock in _cache().glob("*/lock"):  # each use writes it anew
        with suppress(OSError):  # another process removes it just now
            if lock.stat().st_mtime < before_s and source_of(str(lock.parent)) is None:
                shutil.rmtree(lock.parent)


def _is_there(file: Path, directory: Path, with_weights: bool) -> bool:
    """Return whether `directory` has what this version of `file` contains."""
    try:
        known = json.loads((directory / _SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    wanted = (TENSORS, WEIGHTS) if with_weights else (TENSORS,)
    return known == _version(file) and all((directory / name).exists() for name in wanted)


def _version(file: Path) -> dict[str, str | int]:
    status = file.stat()
    return {"file": str(file.resolve()), "bytes": status.st_size, "changed_ns": status.st_mtime_ns}


def _unpack(file: Path, directory: Path, with_weights: bool) -> None:
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise EngineStartError(f"reading {file.name} needs {' and '.join(missing)}: pip install 'tidegate[gguf]'")
    log = structlog.get_logger(__name__)
    log.info("unpacking the GGUF file; the next start finds it unpacked", file=str(file), directory=str(directory))
    for old in (_SOURCE, WEIGHTS):
        (directory / old).unlink(missing_ok=True)
    options = ["--weights"] if with_weights else []
    command = [sys.executable, "-m", "engine.native.model.gguf", *options, str(file.resolve()), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise EngineStartError(f"{file.name} cannot be read: {said[-1] if said else f'exit code {done.returncode}'}")
    (directory / _SOURCE).write_text(json.dumps(_version(file)), encoding="utf-8")
    log.info("the GGUF file is unpacked", **json.loads(done.stdout.strip().splitlines()[-1]))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate" / "gguf"
