"""GGUF files: every command finds a model's directory, and the engine computes what the file holds."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.gguf import WEIGHTS, remove_orphans, unpacked
from engine.native.model.quantized import QuantizedLinear
from engine.native.model.weights import CannotKeepError
from gateway.requests.tokens.model_files import read_max_model_len
from tests.engine.drive import drive, make_new
from tests.engine.gguf_files import ENDS, TEMPLATE, write_llama
from tests.engine.models import generate, make_prompts, save_model, tiny
from tests.engine.native.cpu.compiled import library_with_products

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


def load_blocks(file: Path, hf_config: Any) -> Any:
    """Return transformers' model with the blocks of `file`, in float32."""
    from gguf import GGUFReader

    from engine.native.model.gguf import write_tensors
    from engine.native.model.gguf_model import load_kept

    write_tensors(GGUFReader(file), file.parent)
    return load_kept(file, file.parent, hf_config, {"dtype": torch.float32})


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


def test_the_quick_reader_reads_what_the_package_reads(made: Made) -> None:
    from gguf import GGUFReader

    from engine.native.model.gguf import read

    ours, theirs = read(str(made[0])), GGUFReader(made[0])
    assert read(str(made[0])) is ours, "a file is read once"
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert (ours.fields[name].contents(), ours.fields[name].types) == (field.contents(), field.types), name
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.tensor_type, mine.data_offset) == (other.name, other.tensor_type, other.data_offset)
        assert mine.data.dtype == other.data.dtype and (mine.data == other.data).all()


@pytest.mark.timeout(400)
def test_the_engine_computes_what_the_file_holds(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    file, model = made
    directory = unpacked(file, with_weights=True)
    check_tokens(directory, model.bfloat16().float())
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"], "other programs look here for the model's class"
    monkeypatch.setattr("engine.gguf.find_spec", lambda name: None)  # now it cannot be unpacked again
    assert unpacked(file, with_weights=True) == directory
    assert unpacked(file, with_weights=False) == directory
    os.utime(file, ns=(1, 1))
    with pytest.raises(EngineStartError, match=r"needs gguf and accelerate: pip install 'tidegate\[gguf\]'"):
        unpacked(file, with_weights=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_blocks_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    """Rows of queries and keys have another order in a file."""
    file, model = make_file(tmp_path, kind)
    kept = load_blocks(file, model.config)
    quantised = {name: m for name, m in kept.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(quantised) == 2 * 7 + 1
    for name, parameter in model.state_dict().items():
        path = name.removesuffix(".weight")
        found = quantised[path].unpacked(torch.float32) if path in quantised else kept.state_dict()[name]
        torch.testing.assert_close(found, parameter, rtol=1e-6, atol=1e-7)
    prompts = make_prompts(random.Random(3), count=3)
    assert all(generate(kept, p, 8) == generate(model, p, 8) for p in prompts.values())


@pytest.mark.timeout(400)
def test_blocks_that_are_not_known_are_rounded_to_eight_bits(tmp_path: Path) -> None:
    """So a layer that has some of them is computed in one call, too."""
    model = save_model(tmp_path / "plain", tiny("Llama", **{**SIZES, "intermediate_size": 256})())
    held = write_llama(tmp_path / "small.gguf", model, "Q8_0", downs="Q2_K")
    kept = load_blocks(tmp_path / "small.gguf", model.config)
    quantised = {name: m for name, m in kept.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(quantised) == 2 * 7 + 1
    for path, layer in quantised.items():
        found, expected = layer.unpacked(torch.float32), held[f"{path}.weight"]
        error = float((found - expected).norm() / expected.norm())
        assert 0.001 < error < 0.005 if path.endswith("down_proj") else error < 1e-6, path


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_keeps_blocks_where_it_multiplies_them(dtype: str, tmp_path: Path) -> None:
    if dtype == "bfloat16":
        library_with_products()
    file, model = make_file(tmp_path, "Q8_0")
    directory = unpacked(file, with_weights=False)
    options: dict[str, Any] = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 1 << 20}
    with capture_logs() as logs:
        engine = build_torch_engine(EngineConfig(str(directory), dtype=dtype, **options))
    assert engine.info.eos_token_ids == (0, 1)
    events = [entry["event"] for entry in logs]
    stays, changes = (
        "weights stay as the blocks of the GGUF file",
        "the blocks of the GGUF file do not stay as they are",
    )
    assert (stays in events, changes in events) == (dtype == "bfloat16", dtype == "float32")
    assert (directory / WEIGHTS).exists() is (dtype == "float32")
    prompts = make_prompts(random.Random(3), count=8)
    driven = drive(engine, [make_new(k, p, max_tokens=1, ignore_eos=True) for k, p in prompts.items()])
    agree = [tuple(driven[k].output) == generate(model, p, 1) for k, p in prompts.items()]
    assert sum(agree) >= (8 if dtype == "float32" else 6)


def test_matrices_of_another_shape_than_the_metadata_say_are_refused(made: Made) -> None:
    config = tiny("Llama", **{**SIZES, "num_key_value_heads": 4})()
    shapes = r"k_proj.weight with \(32, 64\) instead of \(64, 64\)"
    with pytest.raises(EngineStartError, match=f"4 weights have another shape .*{shapes}"):
        load_blocks(made[0], config)


def test_why_blocks_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, model = make_file(tmp_path, "F16")
    with pytest.raises(CannotKeepError, match="its matrices are F16"):
        load_blocks(file, model.config)
    file, model = make_file(tmp_path, "Q8_0")
    monkeypatch.setattr("engine.native.model.gguf_model.called_modules", lambda model: set())
    with pytest.raises(CannotKeepError, match="q_proj is not called as a layer"):
        load_blocks(file, model.config)


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


def test_a_file_that_is_cut_short_or_has_no_tokenizer_is_refused(made: Made, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(made[0].read_bytes()[:-2000])
    with pytest.raises(EngineStartError, match=r"cut\.gguf cannot be read: it is cut short or damaged, so get"):
        unpacked(cut, with_weights=True)
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(made[0].read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    with pytest.raises(EngineStartError, match="it has no tokenizer; make it again with its model's vocabulary"):
        unpacked(bare, with_weights=True)


def test_copies_of_files_that_are_gone_are_removed_some_time_after_their_last_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copies, file = tmp_path / "tidegate" / "gguf", tmp_path / "there.gguf"
    file.touch()
    for name, source, used_s in (("used", "gone", 200), ("old", "gone", 99), ("kept", str(file), 99)):
        (copies / name).mkdir(parents=True)
        (copies / name / "source.json").write_text(json.dumps({"file": source}))
        (copies / name / "lock").touch()
        os.utime(copies / name / "lock", (used_s, used_s))
    remove_orphans(100)
    assert sorted(path.name for path in copies.iterdir()) == ["kept", "used"]


def test_a_use_of_a_copy_is_noted(made: Made) -> None:
    file, _ = made
    lock = unpacked(file, with_weights=False) / "lock"
    os.utime(lock, (99, 99))
    unpacked(file, with_weights=False)
    assert lock.stat().st_mtime > 100
