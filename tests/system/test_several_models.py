"""Two models behind one door, as `tidegate serve --model a=DIR --model b=DIR` serves them on one machine."""

from pathlib import Path

import httpx
import pytest

from demo_model.location import demo_model_path
from tests.system.server import START_TIMEOUT_S, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


def test_each_model_has_a_worker_and_outlives_the_others(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    path = demo_model_path()
    models.write_text(f"models:\n  a: {{path: {path}, fallback: b}}\n  b: {{path: {path}}}\n", encoding="utf-8")
    with running(tmp_path / "data", "--models", str(models)) as server:
        wait_for(
            lambda: server.is_ready() and all(httpx.get(f"{server.root}/ready").json()["models"].values()),
            START_TIMEOUT_S,
            "both serve",
        )

        def answered_by(model: str) -> str:
            body = {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
            answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["model"])

        assert (answered_by("a"), answered_by("b")) == ("a", "b")
        own, other = server.workers()
        assert own != other
        server.kill("worker of b")
        assert answered_by("a") == "a", "what happens to one model concerns no other"
        page = httpx.get(f"{server.root}/metrics", timeout=10).text
        assert 'tidegate_workers_alive{model="a"} 1.0' in page
