"""Finds out about a server before it gets work: which kind it is, which model it has, whether token ids come back.

Waits as long as the server does not answer, and says so. Knows the model directory for the sizes that a server does not
tell. Raises `EngineStartError` for what waiting cannot mend.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import structlog
from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

from engine.config import EngineStartError
from engine.interface import EngineInfo, ModelKind
from engine.streaming import UpstreamBusy, UpstreamLost, UpstreamRefused, UpstreamUnusable
from engine.upstream.client import HttpUpstream
from engine.upstream.dialects import DIALECTS, PLAIN, Dialect, DialectName, recognise
from engine.upstream.http import Address, BadUrl, HttpSender
from engine.upstream.status import ModelCard, list_models
from engine.upstream.texts import Texts
from engine.upstream.vectors import VectorUpstream

log = structlog.get_logger()

PAUSE_S = 1.0  # seconds between two attempts to reach the server
SAY_EVERY = 15  # attempts after which it is said again that the server does not answer
BLOCK_SIZE = 16  # tokens; the server's KV blocks have at least so many, as far as progress is measured by them
MAX_STEP_TOKENS = 2048  # a guess at the prompt tokens that the server computes in one step
DEFAULT_CONTEXT = 4096  # tokens, if neither the server nor the model's config says it


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Where the server is, and what is known of it."""

    url: str
    model_path: str  # directory or hub id of the model, for its tokenizer and its sizes
    dialect: DialectName | Literal["auto"] = "auto"
    model: str | None = None  # name of the model at the server; None: the only one that it lists
    api_key: str = ""
    max_model_len: int | None = None
    kind: ModelKind = "chat"
    takes_images: bool = False


async def connect(config: UpstreamConfig, sleep: Callable[[float], Any] = asyncio.sleep) -> HttpUpstream:
    """Return the server that `config` describes, when it answers. Raises `EngineStartError`."""
    try:
        sender = HttpSender(Address.parse(config.url, config.api_key))
    except BadUrl as error:
        raise EngineStartError(f"--upstream {error}") from error
    attempts = 0
    while True:
        try:
            return await _inspect(config, sender)
        except (UpstreamLost, UpstreamBusy) as error:
            if attempts % SAY_EVERY == 0:
                log.warning("the upstream does not answer yet; the worker waits for it", reason=str(error))
        attempts += 1
        await sleep(PAUSE_S)


async def _inspect(config: UpstreamConfig, sender: HttpSender) -> HttpUpstream:
    card = _choose(await _models(sender), config, sender)
    dialect = recognise(card.owned_by) if config.dialect == "auto" else DIALECTS[config.dialect]
    info = _info(config, card, sender.address, dialect)
    upstream = await _tried(sender, dialect, card, info, config)
    if upstream is None and config.dialect != "auto":
        raise EngineStartError(
            f"the server at {sender.address} returns no token ids in the dialect {dialect.name!r}: "
            "try --upstream-dialect plain"
        )
    if upstream is None:
        dialect, info = PLAIN, replace(info, device="plain")
        upstream = HttpUpstream(sender, PLAIN, card, info, _texts(config.model_path))
    if config.takes_images and config.kind == "chat":
        upstream.take_images(_texts(config.model_path))
    log.info(
        "the upstream answers",
        url=str(sender.address),
        dialect=upstream.info.device,
        model=card.id,
        max_model_len=info.max_model_len,
        caches_prefixes=upstream.caches_prefixes,
        cannot=sorted(upstream.unsupported),
    )
    return upstream


async def _models(sender: HttpSender) -> list[ModelCard]:
    try:
        return await list_models(sender)
    except UpstreamUnusable as error:
        raise EngineStartError(str(error)) from error


def _choose(cards: list[ModelCard], config: UpstreamConfig, sender: HttpSender) -> ModelCard:
    names = [card.id for card in cards]
    if config.model is None and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card.id == config.model:
            return card
    raise EngineStartError(
        f"the server at {sender.address} has the models {', '.join(names) or '(none)'}: "
        "say which one by --upstream-model"
    )


async def _tried(
    sender: HttpSender,
    dialect: Dialect,
    card: ModelCard,
    info: EngineInfo,
    config: UpstreamConfig,
    *,
    with_priority: bool = True,
) -> HttpUpstream | None:
    """Return the server after a trial of one token; None if it does not return token ids.

    A server without priority scheduling refuses priorities; then none are sent.
    """
    if config.kind != "chat":
        return await _tried_vectors(sender, dialect, card, info, config)
    if not dialect.takes_ids:
        return HttpUpstream(sender, dialect, card, info, _texts(config.model_path))
    is_texts_used = dialect.name == "llama.cpp" and _file(config.model_path, "tokenizer.json") is not None
    texts = _texts(config.model_path) if is_texts_used else None
    upstream = HttpUpstream(sender, dialect, card, info, texts, with_priority=with_priority)
    try:
        if not await upstream.try_out():
            return None
        await upstream.try_cache()
        return upstream
    except (UpstreamRefused, UpstreamUnusable) as error:
        if not (with_priority and dialect.priority and "priority" in str(error)):
            raise EngineStartError(f"the server refuses a first request: {error}") from error
    log.warning("the upstream takes no priorities", hint="start vLLM with --scheduling-policy priority")
    return await _tried(sender, dialect, card, info, config, with_priority=False)


async def _tried_vectors(
    sender: HttpSender, dialect: Dialect, card: ModelCard, info: EngineInfo, config: UpstreamConfig
) -> HttpUpstream:
    """Return a server that makes vectors, after a trial of one. One that takes no token ids gets texts."""
    upstream = VectorUpstream(sender, dialect, card, info, _texts(config.model_path), config.kind)
    try:
        await upstream.try_out()
        return upstream
    except (UpstreamRefused, UpstreamUnusable) as error:
        if isinstance(error, UpstreamUnusable) or not dialect.takes_ids or config.dialect != "auto":
            raise EngineStartError(f"the server refuses a first request: {error}") from error
    return await _tried_vectors(sender, PLAIN, card, replace(info, device="plain"), config)


def _info(config: UpstreamConfig, card: ModelCard, address: Address, dialect: Dialect) -> EngineInfo:
    """Return the sizes of the model: the server's own where it tells them, otherwise those of the model directory."""
    declared = _read_json(config.model_path, "config.json")
    text = declared.get("text_config") or declared
    lengths = [config.max_model_len, card.context or text.get("max_position_embeddings")]
    max_model_len = min((int(length) for length in lengths if length), default=DEFAULT_CONTEXT)
    backend = _tokenizer(config.model_path) if "vocab_size" not in text else None
    return EngineInfo(
        model_path=config.model_path,
        max_model_len=max_model_len + (config.kind != "chat"),  # with the token that stands for a vector
        vocab_size=int(text["vocab_size"]) if backend is None else backend.get_vocab_size(),
        block_size=BLOCK_SIZE,
        # The server has the blocks, and counts them. This number only keeps out what can never fit its context.
        num_blocks=-(-max_model_len // BLOCK_SIZE) * 256,
        max_step_tokens=MAX_STEP_TOKENS,
        eos_token_ids=_eos_token_ids(config.model_path, text),
        device=dialect.name,
        dtype="",
        attention_backend=str(address),
        preemption_modes=("recompute",) if dialect.takes_ids else (),
    )


def _eos_token_ids(model_path: str, text_config: dict[str, Any]) -> tuple[int, ...]:
    declared = _read_json(model_path, "generation_config.json").get("eos_token_id", text_config.get("eos_token_id"))
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def _texts(model_path: str) -> Texts:
    bos = _read_json(model_path, "tokenizer_config.json").get("bos_token") or ""
    return Texts(_tokenizer(model_path), bos if isinstance(bos, str) else str(bos.get("content", "")))


def _tokenizer(model_path: str) -> Any:
    path = _file(model_path, "tokenizer.json")
    if path is None:
        raise EngineStartError(f"{model_path}: there is no tokenizer.json, which a server without token ids needs")
    return Tokenizer.from_file(str(path))


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    """Return a file of the model; nothing if the model does not have it."""
    path = _file(model_path, name)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    return found


def _file(model_path: str, name: str) -> Path | None:
    if Path(model_path).is_dir():
        path = Path(model_path) / name
        return path if path.exists() else None
    try:
        return Path(hf_hub_download(model_path, name))
    except Exception as error:  # the hub's errors have no common class; the file may simply not be there
        log.warning("a file of the model was not found", model=model_path, file=name, reason=str(error))
        return None
