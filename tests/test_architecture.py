"""The shape of the program, read from its source: who imports whom, what costs torch, what policy may know.

`gateway → scheduler → engine.interface`, one way; `tidegate` and `loadtest` on top, imported by nobody.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "scheduler", "gateway", "tidegate", "loadtest", "demo_model")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
INITS = [path for path in MODULES if path.name == "__init__.py"]

# What a package may import of the others. The composition root knows every part.
MAY_IMPORT = {
    "engine": {"engine"},
    "scheduler": {"scheduler", "engine.interface", "engine.latency_model"},
    "gateway": {"gateway", "scheduler", "engine.interface"},
    "loadtest": {"loadtest", "scheduler", "engine", "gateway"},
    "demo_model": {"demo_model"},
    "tidegate": {"tidegate", "gateway", "scheduler", "engine", "demo_model"},
}
# The engine's files that never touch a device: importing them must not cost torch.
ENGINE_WITHOUT_TORCH = {
    "interface",
    "config",
    "block_pool",
    "prefix_cache",
    "plan_check",
    "sequence",
    "sequence_table",
    "outcome",
    "token_counts",
    "step_batch",
    "engine_thread",
    "latency_model",
    "step_regression",
    "row_table",
    "modeled_engine",
    "loop_timer",
    "shedding",
}
# Runs in a process of its own: what the device can do, measured with torch itself.
MEASURES_THE_DEVICE = {"loadtest.engine_bench.device_probe"}
POLICY = (
    "batch",
    "acceptance",
    "block_budget",
    "continuation",
    "roster",
    "core",
    "engine_books",
    "sla",
    "preemption",
    "admission",
    "urgency",
    "forecast",
    "gate",
    "in_flight",
    "hindsight",
    "capacity",
    "states",
    "windows",
    "config",
    "request",
)
# What pure policy has no business with: clocks, I/O, logs, metrics, tensors.
IMPURE = {"time", "datetime", "asyncio", "random", "logging", "structlog", "prometheus_client", "redis", "torch"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that is imported anywhere in the file, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # `from scheduler import admission` names a module; `from scheduler.config import Tier` does not.
            submodules = [f"{module}.{a.name}" for a in node.names if _is_module(f"{module}.{a.name}")]
            yield from submodules or [module]


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def top_level(name: str) -> str:
    return name.split(".")[0]


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


def test_there_is_something_to_look_at() -> None:
    assert {top_level(name_of(path)) for path in MODULES} == set(PACKAGES)
    assert len(MODULES) > 50


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in MODULES
        if top_level(name_of(path)) == package
        for imported in imports_of(path)
        if top_level(imported) in PACKAGES and not is_within(imported, MAY_IMPORT[package])
    ]
    assert not wrong


def test_torch_stays_in_the_engines_device_files() -> None:
    """The model's trainer is a program of its own; everything else that serves must start without torch."""
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in MODULES
        if top_level(name_of(path)) != "demo_model"
        and name_of(path) not in MEASURES_THE_DEVICE
        and not (path.is_relative_to(ROOT / "engine") and path.stem not in ENGINE_WITHOUT_TORCH)
        for imported in imports_of(path)
        if top_level(imported) == "torch"
    ]
    assert not wrong


def test_the_engines_plain_files_do_not_lead_to_its_device_files() -> None:
    wrong = [
        f"engine.{name} imports {imported}"
        for name in sorted(ENGINE_WITHOUT_TORCH)
        for imported in imports_of(ROOT / "engine" / f"{name}.py")
        if top_level(imported) == "engine" and imported.removeprefix("engine.") not in ENGINE_WITHOUT_TORCH
    ]
    assert not wrong


@pytest.mark.parametrize("module", POLICY)
def test_policy_knows_no_clock_no_store_and_no_metrics(module: str) -> None:
    imported = {top_level(name) for name in imports_of(ROOT / "scheduler" / f"{module}.py")}
    assert not imported & IMPURE


def test_policy_imports_where_torch_redis_and_prometheus_are_absent() -> None:
    """In a fresh interpreter whose import system refuses them, so that no detour counts either."""
    names = [f"scheduler.{module}" for module in POLICY] + [f"engine.{m}" for m in sorted(ENGINE_WITHOUT_TORCH)]
    program = f"""
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"torch", "transformers", "redis", "prometheus_client", "fastapi"}}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_init_files_are_empty() -> None:
    assert INITS
    assert [name_of(path) for path in INITS if path.stat().st_size] == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [name_of(p) for p in MODULES if set(p.stem.split("_")) & VAGUE_NAMES] == []


def test_every_module_says_what_it_is() -> None:
    silent = [name_of(p) for p in MODULES if p not in INITS and not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert silent == []


def test_nothing_happens_at_import() -> None:
    """At the top level of a module there are definitions and constants; `if __name__ == …` is the one door."""
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Expr | ast.For | ast.While | ast.With | ast.Try) and not _is_docstring(node)
    ]
    assert calls == []


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
