"""GGUF files: every command finds a model's directory, and the engine computes what the file holds."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.gguf import WEIGHTS, unpacked
from gateway.requests.tokens.model_files import read_max_model_len
from tests.engine.drive import drive, make_new
from tests.engine.gguf_files import ENDS, TEMPLATE, write_llama
from tests.engine.models import generate, make_prompts, save_model, tiny

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


Made = tuple[Path, Any]  # a file, and transformers' model with the weights that it holds


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of these tests' own: unpacking takes seconds, and each file is unpacked once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make_file(directory: Path, kind: str) -> Made:
    model = save_model(directory / "plain", tiny("Llama", **SIZES)())
    file = directory / "small.gguf"
    model.load_state_dict(write_llama(file, model, kind))
    return file, model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_file(tmp_path_factory.mktemp("file"), "Q8_0")


def check_tokens(directory: Path, model: Any) -> None:
    """Check that the engine generates what `model` does."""
    engine = build_torch_engine(EngineConfig(str(directory), dtype="float32", block_size=4, kv_cache_bytes=1 << 20))
    assert engine.info.eos_token_ids == (0, 1)
    prompts = make_prompts(random.Random(3), count=3)
    driven = drive(engine, [make_new(k, p, max_tokens=8, ignore_eos=True) for k, p in prompts.items()])
    outputs = {k: tuple(d.output) for k, d in driven.items()}
    assert outputs == {k: generate(model, p, 8) for k, p in prompts.items()}
    assert len(set(sum(outputs.values(), ()))) > 5, "a model that repeats one token would pass with any weights"


def test_a_gateway_finds_the_tokenizer_and_needs_no_weights(made: Made, tmp_path: Path) -> None:
    from engine.native.model.gguf import unpack  # imports gguf

    about = unpack(made[0], tmp_path, with_weights=False)
    assert about == {"tensors": {"Q8_0": 2 * 7 + 2}, "weights": "not needed here"}
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("ab<|turn|>", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "b", ENDS[1]]
    assert (tmp_path / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert read_max_model_len(str(tmp_path)) == 128
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.timeout(400)
def test_the_engine_computes_what_the_file_holds(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    file, model = made
    directory = unpacked(file, with_weights=True)
    check_tokens(directory, model.bfloat16().float())
    monkeypatch.setattr("engine.gguf.find_spec", lambda name: None)  # now it cannot be unpacked again
    assert unpacked(file, with_weights=True) == directory
    assert unpacked(file, with_weights=False) == directory
    os.utime(file, ns=(1, 1))
    with pytest.raises(EngineStartError, match=r"needs gguf and accelerate: pip install 'tidegate\[gguf\]'"):
        unpacked(file, with_weights=True)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_wide_numbers_are_not_rounded(tmp_path: Path) -> None:
    file, model = make_file(tmp_path, "F32")
    check_tokens(unpacked(file, with_weights=True), model)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"missing\.gguf does not exist"):
        unpacked(tmp_path / "missing.gguf", with_weights=True)
    part = tmp_path / "big-00002-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(EngineStartError, match="one part of several: join them with `llama-gguf-split --merge`"):
        unpacked(part, with_weights=True)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(EngineStartError, match=r"damaged\.gguf is no GGUF file"):
        unpacked(damaged, with_weights=True)
