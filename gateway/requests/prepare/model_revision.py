"""Tell one version of a model's files from another, for `system_fingerprint` and the answer cache.

Knows files and the hub's cache; does not know what is in the files.
"""

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

MAX_READ_BYTES = 2**20  # larger files, such as weights, are told apart by their size and time of change


def model_revision(model: str) -> str:
    """Return a text that changes when the files of `model` do, which is a transformers directory or a hub id.

    For a hub id, this is the commit in the hub's cache; an empty text if the model is not cached.
    """
    directory = Path(model)
    if directory.is_dir():
        digest = hashlib.sha256()
        for path in sorted(path for path in directory.iterdir() if path.is_file()):
            digest.update(f"{path.name}\0{_version_of(path)}\0".encode())
        return digest.hexdigest()
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return ""
    return Path(cached).parent.name if isinstance(cached, str) else ""


def _version_of(path: Path) -> str:
    status = path.stat()
    if status.st_size > MAX_READ_BYTES:
        return f"{status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
