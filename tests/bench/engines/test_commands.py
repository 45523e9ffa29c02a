"""The commands that measure an engine, run as a user runs them, on models that take no time."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.__main__ import main
from bench.engines import commands
from bench.engines.roofline import Peaks
from bench.engines.systems.process import serve
from bench.engines.systems.protocol import Done, Failed, Order, Ready, SystemSpec, decode, encode
from bench.engines.work import WorkShape, make_job
from loadtest.model_shapes import write_shape
from loadtest.random_weights import write_weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with weights that takes no time to load or run."""
    directory = write_shape(tmp_path_factory.mktemp("tiny"), "tiny")
    write_weights(directory, torch.bfloat16, torch.device("cpu"), seed=1)
    return directory


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Engines in this process set the number of threads; other tests must not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def read(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    return found


@pytest.mark.full
def test_engine_as_a_command_writes_its_table_and_json(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "engines", "--quick", "--model", str(tiny), "--threads", "1"]
    command += ["--systems", "tidegate,vllm", "--streams", "2", "--rounds", "2", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    result = read(tmp_path / "r.json")
    assert {"hardware", "model", "seed", "threads", "dtype", "agreement", "settings"} <= set(result)
    assert all(row["tokens_per_s"]["value"] > 0 and row["share_of_roofline"] is not None for row in result["jobs"])
    assert {row["streams"] for row in result["steps"]} == {2}
    assert {(row["work"], row["system"]) for row in result["jobs"]} == {
        ("decode", "tidegate"),
        ("prefill", "tidegate"),
        ("mixed", "tidegate"),
    }
    assert result["unavailable"] == {"vllm": "no --vllm-python was given"}
    assert "NOT MEASURED: vllm" in done.stdout and "ours ÷ it" in done.stdout
    assert result["rooflines"]["peaks"]["bytes_per_s"] > 0 and "bench engines" in result["command"]


@pytest.mark.parametrize("name", ["tidegate", "tidegate-loop", "generate_batch", "generate"])
@pytest.mark.filterwarnings("default")  # the warnings of transformers are not ours
def test_every_system_generates_the_requested_number_of_tokens_and_the_same_in_fp32(name: str, tiny: Path) -> None:
    spec = SystemSpec(str(tiny), "float32", "cpu", 1, 128, 4, 5 * 256, 2 * 2 * 2 * 32 * 4)
    job = make_job(WorkShape((3, 40), (2, 9)), 4, 512, 3, "systems")
    orders = io.StringIO(
        "\n".join([encode(spec), *[encode(Order([list(p) for p in job.prompts], list(job.new_tokens)))] * 2])
    )
    replies = io.StringIO()
    serve(name, orders, replies)
    ready, first, second = (decode(line) for line in replies.getvalue().splitlines())
    assert isinstance(ready, Ready) and ready.settings
    assert isinstance(first, Done) and isinstance(second, Done) and first.tokens == second.tokens
    assert [len(tokens) for tokens in first.tokens] == list(job.new_tokens)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    for prompt, tokens in zip(job.prompts, first.tokens, strict=True):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=len(tokens))
        assert output[0].tolist()[len(prompt) :] == tokens


def test_a_system_that_cannot_load_says_why(tmp_path: Path) -> None:
    replies = io.StringIO()
    spec = SystemSpec(str(tmp_path), "float32", "cpu", 1, 128, 4, 1024, 512)
    serve("tidegate", io.StringIO(encode(spec) + "\n"), replies)
    reply = decode(replies.getvalue())
    assert isinstance(reply, Failed) and "config.json" in reply.reason


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shape", "17t"], "there is no shape '17t'"),
        (["--quick", "--systems", "tgi"], "there is no system 'tgi'"),
        (["--model", "nowhere"], "nowhere is no model directory"),
        (["--quick", "--work", "sleep"], "'sleep' is not a valid WorkKind"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "measure_peaks", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main(["engines", *arguments])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert sentence in captured.err and captured.err.count("\n") == 1


def test_the_higher_of_two_probes_counts() -> None:
    assert commands.higher(Peaks(1.0, 5.0), Peaks(2.0, 4.0)) == Peaks(2.0, 5.0)
    assert commands.higher(None, Peaks(2.0, 4.0)) == Peaks(2.0, 4.0)
    assert commands.higher(None, None) is None
