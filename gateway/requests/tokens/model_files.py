"""What the files of a model say beside its weights: its version, its context length, and how to sample from it.

Knows a transformers directory and the hub; does not know requests. A model is a directory or a hub id.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.interface import ModelKind

MAX_READ_BYTES = 2**20  # larger files, such as weights, are told apart by their size and time of change


class SamplingDefaults(BaseModel):
    """The sampling parameters of a request that does not set its own.

    The default values in this class are those of OpenAI's API. They do not change the model's distribution.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1 mean all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def read_sampling_defaults(model: str) -> SamplingDefaults:
    """Return the sampling parameters that a model recommends, or OpenAI's defaults if it recommends none.

    As in vLLM, limits of the output length are ignored. Raises `ValueError` if generation_config.json cannot be read,
    or if a value is not a number in its range.
    """
    path = _file(model, "generation_config.json")
    if path is None:
        return SamplingDefaults()
    try:
        declared: Any = json.loads(path.read_text(encoding="utf-8"))
        return SamplingDefaults(**{name: value for name, value in dict(declared).items() if value is not None})
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{path}: {fault['loc'][0]}: {fault['msg']}") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_max_model_len(model: str) -> int | None:
    """Return the context length in the model's config; None if there is none. It is used while no worker is alive."""
    path = _file(model, "config.json")
    length = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings") if path is not None else None
    return int(length) if length else None


def model_revision(model: str) -> str:
    """Return a text that changes when the files of `model` do, for `system_fingerprint` and the answer cache.

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


def kind_of(model: str) -> ModelKind:
    """Return what the files of `model` say that it is for: those of sentence-transformers name embedding models and
    rerankers, and so do classifiers of transformers. All others are chats.
    """
    if _read_json(model, "config_sentence_transformers.json").get("model_type") == "CrossEncoder":
        return "rerank"
    if _file(model, "modules.json") is not None:
        return "embedding"
    architectures = _read_json(model, "config.json").get("architectures") or ()
    return "rerank" if any(str(a).endswith("ForSequenceClassification") for a in architectures) else "chat"


def _read_json(model: str, name: str) -> dict[str, Any]:
    """Return a file of the model as a mapping; empty if there is none, or if it is no mapping."""
    path = _file(model, name)
    try:
        data: Any = {} if path is None else msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return data if isinstance(data, dict) else {}


def vocabulary_of(model: str) -> str:
    """Return a text that is the same for models whose token ids mean the same texts; empty: unknown.

    Only the tokens and their ids count, not how tokenizer.json writes them, so that releases of its library agree.
    """
    path = _file(model, "tokenizer.json")
    if path is None:
        return ""
    try:
        data = msgspec.json.decode(path.read_bytes())
        tokens = data["model"]["vocab"]
        pairs = list(tokens.items()) if isinstance(tokens, dict) else [(pair[0], i) for i, pair in enumerate(tokens)]
        pairs += [(added["content"], added["id"]) for added in data.get("added_tokens") or ()]
        return hashlib.sha256(msgspec.json.encode(sorted(set(pairs)))).hexdigest()[:12]
    except (OSError, KeyError, IndexError, TypeError, ValueError):  # `msgspec.DecodeError` is a `ValueError`
        return ""


def _version_of(path: Path) -> str:
    status = path.stat()
    if status.st_size > MAX_READ_BYTES:
        return f"{status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _file(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except (EntryNotFoundError, HFValidationError, OSError):
        return None
