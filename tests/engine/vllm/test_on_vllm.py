"""What only vLLM itself can show: its sampled tokens and log probabilities are those of the native engine.

The contract of all engines is tested in `tests/engine/contract`.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from engine import factory
from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.interface import Run, StepPlan
from engine.vllm.build import build_vllm_stepper
from engine.vllm.stepper import VllmStepper
from tests.engine.contract.reported import Reported, assert_alike
from tests.engine.drive import Driven, drive, make_new
from tests.engine.models import save_model, tiny

pytestmark = [
    pytest.mark.skipif(
        "TIDEGATE_TEST_VLLM" not in os.environ, reason="vLLM has an environment of its own: make test-vllm"
    ),
    pytest.mark.filterwarnings("default"),  # vLLM's own warnings
]

MAX_NUM_SEQS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "narrowed": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": ((5, 4.0), (6, -9.0)), "bad_words": ((5, 5), (7,))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(3, 20))},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": tuple(range(0, 97, 2))},
}


def make_config(directory: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_step_tokens": 128,
        "kv_cache_bytes": 1 << 24,
    }
    return EngineConfig(str(directory), **{**settings, **changes})


def vllm_config(directory: Path, flags: str = "") -> EngineConfig:
    processes = os.environ["TIDEGATE_TEST_VLLM"]
    args = f"--enforce-eager --max-num-seqs {MAX_NUM_SEQS} --tensor-parallel-size {processes} {flags}"
    return make_config(directory, engine="vllm", vllm_args=args)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 numbers: vLLM's kernels for CPUs know no smaller ones."""
    directory = tmp_path_factory.mktemp("model")
    save_model(directory, tiny("Llama", hidden_size=128, head_dim=32, max_position_embeddings=256)())
    return directory


@pytest.fixture(scope="module")
def on_vllm(directory: Path) -> Iterator[VllmStepper]:
    stepper = build_vllm_stepper(vllm_config(directory))
    yield stepper
    stepper.close()


def run_all(engine: Any) -> tuple[dict[str, Driven], Reported]:
    """Run one sequence with each of `OPTIONS`, more than vLLM takes in one batch."""
    reported = Reported()
    news = [
        make_new(name, range(20, 31 + i), max_tokens=12, seed=i, logprobs=3, prompt_logprobs=2, **options)
        for i, (name, options) in enumerate(OPTIONS.items())
    ]
    return drive(engine, news, after_step=reported), reported


def test_sampled_tokens_and_log_probabilities_are_those_of_the_native_engine(
    directory: Path, on_vllm: VllmStepper
) -> None:
    assert len(OPTIONS) > MAX_NUM_SEQS
    expected, expected_logprobs = run_all(build_torch_engine(make_config(directory, device="cpu")))
    found, logprobs = run_all(on_vllm)
    assert {name: s.output for name, s in found.items()} == {name: s.output for name, s in expected.items()}
    assert {name: s.finish_reason for name, s in found.items()} == {n: s.finish_reason for n, s in expected.items()}
    for name in OPTIONS:
        assert_alike(logprobs.output[name], expected_logprobs.output[name])
        assert_alike(logprobs.prompt[name], expected_logprobs.prompt[name])


def test_rows_with_a_nan_are_found() -> None:
    from engine.vllm.logits_processor import has_nan

    logits = torch.randn(6, 97)
    logits[:, 3] = float("-inf")
    logits[1, 96] = logits[4, 0] = float("nan")
    logits[5] = float("nan")
    logits[2, 5] = float("inf")
    assert has_nan(logits).tolist() == [0, 1, 0, 0, 1, 1]


def test_the_thread_that_waits_for_processes_sleeps(on_vllm: VllmStepper) -> None:
    """Beside computing threads, one that spins would take a core from them."""
    on_vllm.step(StepPlan(0, start=(make_new("a", range(9), max_tokens=9),), run=(Run("a", 9),)))
    executor: Any = on_vllm._executor
    queues = executor._executor.response_mqs
    assert queues and all(queue._spin_condition.busy_loop_s == 0 for queue in queues)
    on_vllm.step(StepPlan(1, abort=("a",)))


def test_a_step_is_one_message_to_the_workers(on_vllm: VllmStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM drops the notice of an answer that comes soon after another, so a step must not have two."""
    executor: Any = on_vllm._executor
    queue, sent = executor._executor.rpc_broadcast_mq, []
    enqueue = queue.enqueue
    monkeypatch.setattr(queue, "enqueue", lambda message, *rest: (sent.append(message[0]), enqueue(message, *rest)))
    on_vllm.step(StepPlan(0, start=(make_new("a", range(9), max_tokens=9),), run=(Run("a", 9),)))
    on_vllm.step(StepPlan(1, run=(Run("a", 1),)))
    assert len(sent) == 2
    on_vllm.step(StepPlan(2, abort=("a",)))


def test_the_threads_of_vllm_wait_as_vllm_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine's threads sleep soon at a barrier; vLLM's meet many in a step and would sleep at each."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    factory._load_vllm_builder()
    assert "GOMP_SPINCOUNT" not in os.environ


def write_adapter(directory: Path, model: Any) -> dict[str, torch.Tensor]:
    """Write a LoRA adapter of the query projections. Return what it adds to the weights, by the weight's name."""
    torch.manual_seed(11)
    tensors, added = {}, {}
    for i, layer in enumerate(model.model.layers):
        num_out, num_in = layer.self_attn.q_proj.weight.shape
        a, b = torch.randn(8, num_in) * 0.3, torch.randn(num_out, 8) * 0.3
        name = f"model.layers.{i}.self_attn.q_proj"
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        added[f"{name}.weight"] = b @ a  # lora_alpha / r is 1
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return added


def test_an_adapter_computes_what_merged_weights_compute(tmp_path: Path) -> None:
    config = tiny("Llama", hidden_size=128, head_dim=32, max_position_embeddings=256)
    model = save_model(tmp_path / "model", config())
    added = write_adapter(tmp_path / "adapter", model)
    with torch.no_grad():
        for name, change in added.items():
            model.get_parameter(name).add_(change)
    model.save_pretrained(tmp_path / "merged")
    prompts = {"with": range(3, 50), "without": range(3, 50)}

    def expected(directory: Path) -> list[int]:
        native = build_torch_engine(make_config(directory, device="cpu"))
        return drive(native, [make_new("a", range(3, 50))])["a"].output

    stepper = build_vllm_stepper(
        replace(vllm_config(tmp_path / "model"), adapters=(("mine", str(tmp_path / "adapter")),))
    )
    try:
        news = [make_new(name, p, adapter="mine" if name == "with" else None) for name, p in prompts.items()]
        driven = drive(stepper, news, arrivals_a_step=1)  # the second one must not find the blocks of the first one
    finally:
        stepper.close()
    assert stepper.info.adapters == ("mine",)
    assert driven["with"].output == expected(tmp_path / "merged")
    assert driven["without"].output == expected(tmp_path / "model") != driven["with"].output


@pytest.mark.parametrize("flags", ["--no-such-flag", "--tensor-parallel-size two", "--speculative-config {}"])
def test_wrong_flags_are_refused(directory: Path, flags: str) -> None:
    with pytest.raises(EngineStartError, match="--vllm-args") as caught:
        build_vllm_stepper(vllm_config(directory, flags))
    assert "\n" not in str(caught.value)


def test_a_killed_worker_process_fails_the_step(directory: Path) -> None:
    others = set(psutil.Process().children(recursive=True))  # of another test's engine
    stepper = build_vllm_stepper(vllm_config(directory))
    stepper.step(StepPlan(0, start=(make_new("a", range(9), max_tokens=200),), run=(Run("a", 9),)))
    own = set(psutil.Process().children(recursive=True)) - others
    worker = max(own, key=lambda process: process.memory_info().rss)
    worker.send_signal(signal.SIGKILL)
    with pytest.raises(RuntimeError):
        for step_id in range(1, 100):
            stepper.step(StepPlan(step_id, run=(Run("a", 1),)))
    stepper.close()
