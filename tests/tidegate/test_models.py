"""The models of a deployment in the settings: names, aliases, splits, and one worker for each."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from demo_model.location import demo_model_path
from engine.config import EngineStartError
from gateway.requests.tokens.model_files import vocabulary_of
from scheduler.clock import SystemClock
from scheduler.store.address import of_model, parse
from tidegate.doctor.command import findings
from tidegate.doctor.server import check_tiers
from tidegate.gateway.models import open_models
from tidegate.settings.commands import ServeSettings
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.models import ModelsError, named_models, read_models
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.process import CannotStart
from tidegate.worker.engine_worker import engine_config, upstream_config
from tidegate.worker.process import LoopRunner

MODELS = """
models:
  llama: {path: /m/llama, aliases: [gpt-4o], fallback: small, tiers: /t/llama.yaml}
  small: {path: org/small, image_tokens: 900}
  vectors: {path: /m/vectors, kind: embedding}
splits:
  assistant: {llama: 9, small: 1}
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, {}),
        ("/m/run=3", {}),
        ("./run=3", {}),
        ("org/model", {}),
        ("a=/m/a", {"a": "/m/a"}),
        ("a=/m/a,b=org/b=1", {"a": "/m/a", "b": "org/b=1"}),
        ("a=", {}),
    ],
)
def test_models_with_names(text: str | None, found: dict[str, str]) -> None:
    assert named_models(text) == found


def test_the_home_directory_is_a_part_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")  # no shell writes it for "--model NAME=~/PATH"
    assert named_models("a=~/m,b=org/b") == {"a": "/home/ann/m", "b": "org/b"}
    assert GatewaySettings(model="~/m").model_path == WorkerSettings(model="a=~/m").model_path == "/home/ann/m"
    path = tmp_path / "models.yaml"
    path.write_text("models: {a: {path: ~/m}}", encoding="utf-8")
    assert read_models(path).models["a"].path == "/home/ann/m"


def test_a_worker_of_one_model_reads_its_queues(tmp_path: Path) -> None:
    own = WorkerSettings(model="org/a=/m/a", redis_url="redis://h:1/2?deployment=x")
    assert (own.model_path, own.model_names) == ("/m/a", ("org/a",))
    assert parse(own.store_url)[1].namespace == "x:model:org%2Fa:"
    assert WorkerSettings(model="/m/a", redis_url="redis://h:1").store_url == "redis://h:1"
    assert parse(of_model("unix:///tmp/a.sock", "a"))[1].namespace == "tidegate:model:a:"
    with pytest.raises(ValueError, match="has this name only"):
        WorkerSettings(model="a=/m/a", served_model_name=["b"])


def test_serve_has_a_worker_for_each_model(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(MODELS, encoding="utf-8")
    settings = ServeSettings(models=path, worker_id="w", threads=3, health_port=9000)
    (first, llama), (_, small), (_, vectors) = settings.workers()
    assert first == "worker of llama" and (llama.model, small.model) == ("llama=/m/llama", "small=org/small")
    assert (llama.tiers, small.tiers) == (Path("/t/llama.yaml"), None)
    assert [(own.worker_id, own.threads, own.health_port) for own in (llama, small)] == [
        ("w", 3, 9000),
        ("w-2", 3, 9001),
    ]
    assert [(own.kind, own.engine) for own in (llama, small, vectors)] == [
        (None, "native"),
        (None, "native"),
        ("embedding", "embedding"),
    ]
    [*_, (_, remote)] = settings.model_copy(update={"engine": "openai", "upstream": "http://h"}).workers()
    assert (remote.kind, remote.engine) == ("embedding", "openai")
    assert [own.image_tokens for own in (llama, small, vectors)] == [0, 900, 0]
    assert "--models" in settings.flags(GatewaySettings) and "--models" not in llama.flags(WorkerSettings)
    assert settings.served_names() == ("llama", "small", "vectors", "assistant")
    named = ServeSettings(model="a=/m/a,b=/m/b", worker_id="w")
    assert [own.model for _, own in named.workers()] == ["a=/m/a", "b=/m/b"]
    assert {own.threads for _, own in named.workers()} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    assert ServeSettings(model="/m/a").served_names() == ("a",)


def test_doctor_checks_each_model(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {a: {path: /none/a}, b: {path: /none/b, tiers: /none/b.yaml}}", encoding="utf-8")
    texts = [finding.text for finding in findings(ServeSettings(models=path), [("tiers", check_tiers)])]
    assert texts[0].startswith("a: ") and texts[1].startswith("b: /none/b.yaml")
    path.write_text("models: {}", encoding="utf-8")
    [fault] = findings(ServeSettings(models=path), [("tiers", check_tiers)])
    assert fault.subject == "models"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "models"),
        ("models: {}", "models"),
        ("models: {a: {paths: x}}", "models.a.path"),
        ("models: {a: {path: x, kind: vision}}", "models.a.kind"),
        ("models: {a: {path: x, image_tokens: -1}}", "models.a.image_tokens"),
        ("models: {a: {path: x, fallback: b}}", "models.a.fallback: 'b'"),
        ("models: {a: {path: x, fallback: a}}", "models.a.fallback: 'a'"),
        ("models: {a: {path: x, aliases: [b]}, b: {path: y}}", "'b' is the name of more than one"),
        ("models: {a: {path: x}}\nsplits: {s: {b: 1}}", "splits.s: 'b'"),
        ("models: {a: {path: x}}\nsplits: {s: {a: 0}}", r"models.yaml: splits.s: no model has a weight"),
        ("models: {a: {path: x}}\nsplits: {a: {a: 1}}", "'a' is the name of more than one"),
        ("models: [", "models.yaml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(change, encoding="utf-8")
    with pytest.raises(ModelsError, match=message):
        read_models(path)


def test_the_gateway_knows_the_models_vocabulary() -> None:
    queues: Any = None
    [source] = open_models(GatewaySettings(), queues, SystemClock())
    assert source.vocabulary == vocabulary_of(GatewaySettings().model_path) != ""


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ("{a: {path: PATH, fallback: b}, b: {path: PATH, kind: embedding}}", "models.a.fallback"),
        ("{a: {path: PATH}, b: {path: PATH, kind: rerank}}\nsplits: {s: {a: 1, b: 1}}", "splits.s"),
    ],
)
async def test_no_model_answers_for_one_of_another_kind(tmp_path: Path, more: str, place: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(f"models: {more.replace('PATH', str(demo_model_path()))}", encoding="utf-8")
    settings, queues = GatewaySettings(models=path, redis_url="redis://localhost:1"), cast(Any, None)
    with pytest.raises(CannotStart, match=f"{place}: 'a' is of the kind chat"):
        list(open_models(settings, queues, SystemClock()))


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_an_engine_for_chats_names_the_one_for_vectors(tmp_path: Path, engine: Any) -> None:
    (tmp_path / "modules.json").write_text("[]", encoding="utf-8")
    with pytest.raises(EngineStartError, match="--engine embedding"):
        engine_config(WorkerSettings(model=str(tmp_path), engine=engine))
    assert engine_config(WorkerSettings(model=str(tmp_path), engine="embedding")).kind == "embedding"
    assert engine_config(WorkerSettings(model=str(tmp_path), kind="chat", engine=engine)).kind == "chat"


def test_a_worker_that_claims_nothing_is_not_ready() -> None:
    runner, loop = LoopRunner(drain_s=1.0), SimpleNamespace(is_announced=True, why_idle=lambda: "another vocabulary")
    assert "starts" in runner.why_not_ready()
    runner._loop = loop  # type: ignore[assignment]
    assert runner.why_not_ready() == "another vocabulary"
    loop.why_idle = lambda: ""
    assert runner.why_not_ready() == ""


def test_there_is_one_list_of_models(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in place of --model"):
        GatewaySettings(model="/m/a", models=tmp_path / "models.yaml")
    with pytest.raises(ValueError, match="in place of --image-tokens"):
        GatewaySettings(image_tokens=900, models=tmp_path / "models.yaml")


def test_only_a_server_behind_takes_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--image-tokens is for --engine openai"):
        WorkerSettings(image_tokens=900)
    flags: dict[str, Any] = {"engine": "openai", "upstream": "http://h:1"}
    chosen = [WorkerSettings(image_tokens=count, **flags) for count in (900, 0)]
    assert [upstream_config(own).takes_images for own in chosen] == [True, False]
    queues: Any = None
    [source] = open_models(GatewaySettings(image_tokens=900), queues, SystemClock())
    assert source.image_tokens == 900
