"""What a release of vLLM lacks of what our engine uses, read off its source."""

import ast
from pathlib import Path

import pytest

from bench.vllm_surface import differences
from engine.vllm.surface import SURFACE, Used
from tests.test_architecture import ROOT

FILES = {
    "vllm/__init__.py": "",
    "vllm/outputs/__init__.py": "from .plain import Output as Output\nfrom vllm.tools import count\n",
    "vllm/outputs/plain.py": (
        "class Base:\n"
        "    tokens: list[int]\n"
        "    seed: int = 0\n"
        "    KINDS: ClassVar[dict]\n"
        "class Output(Base):\n"
        "    rows: int\n"
        "    def __init__(self): self.queues, self._clock = [], None\n"
        "    def send(self, step, *, wait=False): ...\n"
        "    def call(self, **options): ...\n"
    ),
    "vllm/tools.py": "LIMIT: int = 3\nVALUES = {'LAZY': lambda: 1}\ndef count(): ...\n",
}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


MEMBERS = ("tokens", "seed", "rows", "queues", "_clock", "send(step, wait)", "call(anything)")


@pytest.mark.parametrize(
    ("used", "said"),
    [
        (Used("vllm.outputs", "Output", MEMBERS), []),
        (Used("vllm.outputs", "Output", ("tokens", "rows", "seed"), is_built=True), []),
        (Used("vllm.outputs", "Output", ("rows",), is_built=True), ["needs tokens"]),
        (Used("vllm.outputs", "Output", ("columns",)), ["has no columns"]),
        (Used("vllm.outputs", "Output", ("send(step, rank)",)), ["send has no parameter rank"]),
        (Used("vllm.outputs", "count"), []),
        (Used("vllm.outputs", "gone"), ["is missing"]),
        (Used("vllm.gone", "Output"), ["is missing"]),
        (Used("vllm.tools", "LIMIT"), []),
        (Used("vllm.tools", "LAZY"), []),
    ],
)
def test_each_kind_of_difference_is_found(release: Path, used: Used, said: list[str]) -> None:
    assert differences(release, [used]) == [f"{used.module}.{used.name}: {text}" for text in said]


def test_whatever_the_engine_imports_from_vllm_is_on_the_list() -> None:
    listed = {(used.module, used.name) for used in SURFACE}
    imported = set[tuple[str, str]]()
    for file in (ROOT / "engine" / "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                imported |= {(node.module or "", name.name) for name in node.names}
    assert imported - listed - {("vllm.v1.worker", "gpu_model_runner")} == set()
