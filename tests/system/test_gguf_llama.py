"""The same GGUF file in this engine and in llama.cpp gives the same greedy tokens. `make test-llama` runs it."""

import random
from pathlib import Path

import httpx
import pytest

from bench.engines.systems.client import SystemClient
from bench.engines.systems.protocol import SystemSpec
from bench.engines.work import WorkShape, make_job
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.gguf import unpacked
from tests.engine.drive import drive, make_new
from tests.engine.gguf_files import write_llama
from tests.engine.models import make_prompts, save_model, tiny
from tests.system.llama import MARKS, PYTHON, llama_server

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = MARKS
NUM_TOKENS = 8


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_greedy_tokens_are_those_of_llama_cpp(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Q8_0, llama.cpp rounds activations to 8 bits, too, so that near ties may fall otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 2048}
    write_llama(file, save_model(tmp_path / "plain", tiny("Llama", **sizes)()), kind)
    engine = build_torch_engine(
        EngineConfig(str(unpacked(file, with_weights=True)), dtype="float32", device="cpu", kv_cache_bytes=1 << 22)
    )
    prompts = make_prompts(random.Random(3), count=6)
    no_end = ((0, -100.0), (1, -100.0))  # llama.cpp's `ignore_eos` forbids the tokens that end an answer
    news = [make_new(k, p, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=no_end) for k, p in prompts.items()]
    ours = {k: list(d.output) for k, d in drive(engine, news).items()}
    theirs = generated_by_llama(file, prompts)
    firsts = [ours[k][0] == theirs[k][0] for k in prompts]
    wholes = [ours[k] == theirs[k] for k in prompts]
    assert all(wholes) if kind == "F32" else sum(firsts) >= 5, (ours, theirs)


def generated_by_llama(file: Path, prompts: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    found = {}
    with llama_server(file) as url:
        for name, prompt in prompts.items():
            body = {"prompt": list(prompt), "n_predict": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/completion", json={**body, "return_tokens": True}, timeout=60).json()
            found[name] = answer["tokens"]
    return found


def test_the_benchmark_measures_llama_cpp(tmp_path: Path) -> None:
    """All prompts of a job at once, each with exactly the tokens that are asked for."""
    file = tmp_path / "small.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 2048}
    write_llama(file, save_model(tmp_path / "plain", tiny("Llama", **sizes)()), "Q8_0")
    spec = SystemSpec("", "bfloat16", "cpu", 1, 64, 4, 0, 0, gguf=str(file))
    with SystemClient("llama", spec, tmp_path / "log", str(PYTHON)) as client:
        client.start()
        done = client.run(make_job(WorkShape((3, 9), (2, 5)), 4, 97, 1))
    assert [2 <= len(tokens) <= 5 for tokens in done.tokens] == [True] * 4
