"""All weights are read from disk in their shapes, or the error names what is wrong."""

import importlib.util
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.native.model.loader import load_config, load_model
from tests.engine.drive import drive, make_new
from tests.engine.models import CONFIGS, generate, make_prompts, save_model

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATE = "model.layers.1.mlp.gate_proj.weight"


def make_config(directory: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(str(directory), **{"dtype": "float32", "device": "cpu", "max_num_seqs": 4, **changes})


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = make_config(directory)
    return load_model(config, load_config(config), dtype, CPU)


def refusal(directory: Path, **changes: Any) -> str:
    with pytest.raises(EngineStartError) as caught:
        build_torch_engine(make_config(directory, **changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(directory / SINGLE)
    change(weights)
    save_file(weights, directory / SINGLE, metadata={"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_model(tmp_path, CONFIGS["llama"]())
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(tmp_path, CONFIGS["llama"]()).save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / SINGLE).unlink(missing_ok=True)
    assert (tmp_path / INDEX).is_file()
    return tmp_path


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_dtype_on_disk_converts_to_every_wanted_dtype(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    model = save_model(tmp_path, CONFIGS["llama"]()).to(stored)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, wanted).state_dict()
    for name, weight in model.state_dict().items():
        assert loaded[name].dtype is wanted
        assert torch.equal(loaded[name], weight.to(wanted)), name


def test_all_shards_are_read(sharded: Path) -> None:
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    prompt = (3, 1, 4, 1, 5)
    model = save_model(sharded / "whole", CONFIGS["llama"]())
    driven = drive(build_torch_engine(make_config(sharded)), [make_new("a", prompt)])
    assert tuple(driven["a"].output) == generate(model, prompt, 8)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama-mqa-tied"]())
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    model = load(tmp_path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mapped files")
def test_weights_of_the_wanted_dtype_are_mapped_not_copied(llama: Path) -> None:
    model = load(llama)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(llama) in line]
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in mapped]
    address = model.get_submodule(GATE.removesuffix(".weight")).weight.data_ptr()
    assert any(start <= address < end for start, end in ranges)


def test_all_end_of_sequence_ids_of_the_generation_config_count(llama: Path) -> None:
    first, *_ = drive(build_torch_engine(make_config(llama)), [make_new("a", [1, 2, 3])])["a"].output
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [96, first]}))
    engine = build_torch_engine(make_config(llama))
    assert engine.info.eos_token_ids == (96, first)
    driven = drive(engine, [make_new("a", [1, 2, 3])])["a"]
    assert driven.output == [first]
    assert driven.finish_reason is not None and driven.finish_reason.value == "stop"


def without(part: str) -> Callable[[Path], None]:
    """Return a change that removes all weights with `part` in their names."""
    return lambda llama: change_weights(llama, lambda weights: [weights.pop(n) for n in list(weights) if part in n])


def cut_at(kept: int) -> Callable[[Path], None]:
    """Return a change that leaves the first bytes of the file of weights, or all but the last ones."""
    return lambda llama: (llama / SINGLE).write_bytes((llama / SINGLE).read_bytes()[:kept]) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(GATE), f"lacks the weights {GATE}"),
        (without("layers.1"), "and 6 more"),
        (without("lm_head.weight"), "lm_head.weight"),
        *((cut_at(kept), f"{SINGLE} is damaged") for kept in (0, 5, 2000, -7)),
        (lambda llama: (llama / SINGLE).unlink(), "weights"),
    ],
)
def test_damaged_weights_are_refused(damage: Callable[[Path], None], message: str, llama: Path) -> None:
    damage(llama)
    assert message in refusal(llama)


def test_a_weight_of_another_shape_is_refused(llama: Path) -> None:
    change_config(llama, intermediate_size=40)
    message = refusal(llama)
    assert "have another shape than the config says" in message
    assert "(48, 32) instead of (40, 32)" in message or "(32, 48) instead of (32, 40)" in message


def test_weights_that_the_model_does_not_know_are_logged(llama: Path) -> None:
    change_weights(llama, lambda weights: weights.update({"model.extra.weight": torch.zeros(3)}))
    with structlog.testing.capture_logs() as logs:
        load(llama)
    (entry,) = [entry for entry in logs if entry["event"] == "unused weights in the checkpoint"]
    assert entry["names"] == "model.extra.weight"


def shard_of(sharded: Path) -> Path:
    return sorted(sharded.glob("model-*.safetensors"))[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: shard_of(s).write_bytes(shard_of(s).read_bytes()[:-1]), "model-00002-.* is damaged"),
        (lambda s: shard_of(s).unlink(), f"{INDEX} names model-00002-.*, which does not exist"),
        *(
            (lambda s, text=text: (s / INDEX).write_text(text), f"{INDEX} is not a valid index of weights")
            for text in ("{", "[]", "{}", '{"weight_map": 3}')
        ),
    ],
)
def test_damaged_shards_are_refused(damage: Callable[[Path], object], message: str, sharded: Path) -> None:
    damage(sharded)
    assert re.search(message, refusal(sharded))


# The packages that each quantisation method needs, in the order in which the error names the first that is missing.
PACKAGES = {
    "torchao": ("torchao",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "fp8": ("accelerate",),
    "hqq": ("hqq",),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
    "gptq": {"bits": 4},
    "bitsandbytes": {"load_in_8bit": True},
}


@pytest.mark.parametrize("method", PACKAGES)
def test_a_quantised_model_names_the_package_that_it_needs(method: str, llama: Path) -> None:
    missing = [name for name in PACKAGES[method] if not importlib.util.find_spec(name.replace("-", "_"))]
    if not missing:
        pytest.skip("its packages are installed")
    change_config(llama, quantization_config={"quant_method": method, **SETTINGS.get(method, {})})
    message = refusal(llama)
    assert f"is quantised with {method}: " in message
    assert missing[0] in message.split(": ", 1)[1].lower()
    assert message.endswith("(or use --engine vllm, or the model's plain weights with --quantize int8)")


def test_fp8_weights_are_unpacked_where_no_gpu_has_them(tmp_path: Path) -> None:
    """A checkpoint with one scale for each 16 × 16 numbers, as DeepSeek's: the tokens are those of its numbers."""
    pytest.importorskip("accelerate", reason="transformers needs it: tidegate[gguf] has it")
    block = 16
    model = save_model(tmp_path, CONFIGS["llama"]())
    stored = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight.bfloat16()
            weight.copy_(stored[name])
            continue
        blocks = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = codes.flatten(2).flatten(0, 1), scales[:, 0, :, 0].contiguous()
        weight.copy_((codes.float() * scales).flatten(2).flatten(0, 1))
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    change_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]})
    with capture_logs() as logs:
        engine = build_torch_engine(make_config(tmp_path, kv_cache_bytes=1 << 20))
    assert [entry["fused_layers"] for entry in logs if entry["event"] == "model optimized"] == [2]
    prompts = make_prompts(random.Random(3), count=3)
    driven = drive(engine, [make_new(k, p, max_tokens=8) for k, p in prompts.items()])
    expected = {k: generate(model, p, 8) for k, p in prompts.items()}
    assert {k: tuple(d.output) for k, d in driven.items()} == expected
    build_torch_engine(make_config(tmp_path, quantize="int8", kv_cache_bytes=1 << 20))  # plain weights again


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "x"}, "expected int, got str"),
        ({"hidden_size": 33}, "not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"quantization_config": "fp8"}, "'str' object"),
        ({"num_hidden_layers": 0}, "it has no layers"),
    ],
)
def test_a_configuration_that_is_not_valid_is_refused(changes: dict[str, Any], reason: str, llama: Path) -> None:
    change_config(llama, **changes)
    assert re.search(f"its configuration is not valid: .*{reason}", refusal(llama))


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "spiral"}, {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}]
)
def test_a_name_that_transformers_does_not_know_is_refused(changes: dict[str, Any], llama: Path) -> None:
    change_config(llama, **changes)
    assert "its config.json has 'spiral', which is not known" in refusal(llama)


def test_an_unknown_quantisation_is_not_read_as_plain_weights(llama: Path) -> None:
    change_config(llama, quantization_config={"quant_method": "no-such-thing"})
    message = refusal(llama)
    assert "quantised with no-such-thing, which transformers does not know" in message
    assert "--engine vllm" in message and "--quantize int8" in message


def test_the_memory_check_of_quantised_weights_uses_their_size_on_disk(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = (llama / SINGLE).stat().st_size
    monkeypatch.setattr("engine.native.model.loader.free_bytes", lambda device: on_disk)
    change_config(llama, hidden_size=3200)
    assert "not enough memory: the weights take" in refusal(llama)
    change_config(llama, quantization_config={"quant_method": "torchao", **SETTINGS["torchao"]})
    assert "not enough memory" not in refusal(llama)  # the error is about weights or the package
    monkeypatch.setattr("engine.native.model.loader.free_bytes", lambda device: on_disk - 1)
    assert "not enough memory: the weights take" in refusal(llama)


def test_layers_with_quantised_weights_are_not_replaced(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimized: list[Any] = []
    monkeypatch.setattr(
        "engine.native.startup.engine_builder.optimize_for_cpu", lambda model, *_: optimized.append(model)
    )
    build_torch_engine(make_config(llama))
    assert len(optimized) == 1
    monkeypatch.setattr("engine.native.startup.engine_builder.is_quantised", lambda model: True)
    build_torch_engine(make_config(llama))
    assert len(optimized) == 1


class Told:
    """Remembers what it is told about a start. Implements `engine.progress.Progress` and `Phase`."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.shown: list[tuple[int, int]] = []

    @contextmanager
    def phase(self, name: str, *, draws_itself: bool = False) -> Iterator["Told"]:
        assert not draws_itself, "the model is not on the hub"
        self.phases.append(name)
        yield self

    def show(self, done: int, total: int) -> None:
        assert self.phases[-1] == "loading the model"
        self.shown.append((done, total))


def test_a_start_says_what_it_does_and_how_many_tensors_are_loaded(
    llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    build_torch_engine(make_config(llama), told)
    assert told.phases[:3] == ["loading PyTorch", "loading the model", "probing the model"]
    assert told.phases[-1] == "trying faster layers"
    [total] = {total for _, total in told.shown}
    assert [done for done, _ in told.shown] == list(range(total)) and total > 10
    assert "Loading weights" not in capfd.readouterr().err
