"""Common layers are fused, others are not, and the tokens stay the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.native.cpu.packed_linear import PackedLinear, can_pack
from engine.native.startup import loading
from engine.native.startup.fusion import LayerTrial, _agrees, is_same_model
from tests.engine.models import ARCHITECTURES, CONFIGS, save_model
from tests.engine.native.cpu.compiled import compiled_library

FUSED = ("llama", "llama-mqa-tied", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss")
ALSO_FUSED = ("olmo2", "glm4", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe")


@pytest.fixture(autouse=True)
def compiler() -> None:
    compiled_library()


def build(directory: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return the engine and the log entry about its optimization."""
    config = EngineConfig(str(directory), kv_cache_bytes=1 << 20, **{"dtype": "float32", **options})
    with capture_logs() as logs:
        engine = build_torch_engine(config)
    found = [entry for entry in logs if entry["event"] == "model optimized"]
    return engine, found[0] if found else {}


@pytest.mark.parametrize("name", [*CONFIGS, *ALSO_FUSED])
def test_common_layers_are_fused_and_others_are_not(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, {**CONFIGS, **ARCHITECTURES}[name]())
    entry = build(tmp_path)[1]
    assert entry["fused_layers"] == (2 if name in (*FUSED, *ALSO_FUSED) else 0)
    assert entry["fused_experts"] == 0, "in float32, transformers' modules compute them"


def test_a_layer_with_known_parts_and_other_arithmetic_is_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial finds it: this Llama doubles what its attention adds to the residual stream."""
    save_model(tmp_path, CONFIGS["llama"]())
    load = loading.load_model

    def load_doubled(*args: Any) -> Any:
        model: Any = load(*args)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda module, inputs, output: (2 * output[0], *output[1:]))
        return model

    monkeypatch.setattr(loading, "load_model", load_doubled)
    assert build(tmp_path)[1]["fused_layers"] == 0


@pytest.mark.parametrize(
    ("changed", "has_router", "agrees"), [(0, False, True), (1, False, False), (3, True, True), (4, True, False)]
)
def test_a_router_may_send_a_third_of_the_rows_elsewhere(changed: int, has_router: bool, agrees: bool) -> None:
    hidden = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
    wrong = 2 * hidden
    wrong[:, :changed] *= 1.1
    replacement: Any = lambda x: wrong  # noqa: E731
    assert _agrees(replacement, LayerTrial(hidden, {}, 2 * hidden), has_router) == agrees


def test_optimization_can_be_switched_off(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"]())
    assert build(tmp_path, optimize=False)[1] == {}


@pytest.mark.parametrize("biases", [(False,), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_packed_products_equal_plain_ones(biases: tuple[bool, ...], rows: int) -> None:
    if not can_pack(torch.bfloat16):
        pytest.skip("this torch has no packed bfloat16 products")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Linear(64, 9000 + 8 * i, bias=bias, dtype=torch.bfloat16) for i, bias in enumerate(biases)]
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = torch.cat([layer(x) for layer in layers], dim=-1)
        torch.testing.assert_close(PackedLinear(layers)(x), expected, atol=0.02, rtol=0.02)


def test_only_bfloat16_is_packed() -> None:
    assert not can_pack(torch.float32)
    assert not can_pack(torch.float16)


class KeepsItsEmbedding(nn.Module):
    """A model body that adds its input embeddings to its output."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any, **options: Any) -> Any:
        started_with = None

        def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            nonlocal started_with
            started_with = output

        handle = self.body.embed_tokens.register_forward_hook(keep)
        output = self.body(*args, **options)
        handle.remove()
        output.last_hidden_state = output.last_hidden_state + 5 * started_with
        return output


def test_a_model_that_reuses_an_input_of_its_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fused layer is right, but it overwrites in place the embeddings that the model has kept."""
    save_model(tmp_path, CONFIGS["llama"]())
    load = loading.load_model

    def load_wrapped(*args: Any) -> Any:
        model: Any = load(*args)
        model.model = KeepsItsEmbedding(model.model)
        return model

    monkeypatch.setattr(loading, "load_model", load_wrapped)
    with pytest.raises(EngineStartError, match="--no-optimize"):
        build(tmp_path)
    build(tmp_path, optimize=False)


@pytest.mark.parametrize("routes", [False, True])
def test_one_row_of_the_whole_model_may_differ_where_a_router_chose(routes: bool) -> None:
    before = torch.ones(3, 8)
    one, two = before.clone(), before.clone()
    one[1], two[1:] = -1, -1
    assert is_same_model(before, before, torch.float32, routes=routes)
    assert is_same_model(before, one, torch.float32, routes=routes) is routes
    assert not is_same_model(before, two, torch.float32, routes=routes)
