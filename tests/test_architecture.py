"""The shape of the program, read from its source: which room may import which, what costs torch, what policy may know.

A room is a module or a folder directly inside its house. `HOUSES` gives each house's rooms in the order in which they
import: a room imports itself and rooms of the levels before its own, never one beside or behind it.
"""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "scheduler", "gateway", "tidegate", "loadtest", "bench", "demo_model")
SCRIPTS = ROOT / "bench" / "conformance" / "scripts"  # programs that run with the packages of other environments
MODULES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not path.is_relative_to(SCRIPTS)
)
INITS = [path for path in MODULES if path.name == "__init__.py"]

# What a package may import of the others. The composition root knows every part.
MAY_IMPORT = {
    "engine": {"engine"},
    "scheduler": {"scheduler", "engine.interface", "engine.step_time", "engine.streaming", "engine.static.interface"},
    "gateway": {"gateway", "scheduler", "engine.interface", "engine.streaming"},
    "loadtest": {"loadtest", "scheduler", "engine", "gateway"},
    "bench": {"bench", "loadtest", "scheduler", "engine", "gateway", "tidegate"},
    "demo_model": {"demo_model"},
    "tidegate": {"tidegate", "gateway", "scheduler", "engine", "demo_model"},
}
# The levels of each house from the bottom up; the rooms of one level do not import each other.
HOUSES = {
    "tidegate": "away → batch logs settings supervision top tracing → gateway keys valkey worker"
    " → adopt backup demo doctor serve → cli",
    "gateway": "console fairness store_keys → files → protocol → audit dead_letters identity output → http → keys"
    " → requests → dialects models → jobs → state → routes → app",
    "gateway/requests": "tokens → answers → prepare → generate",
    "gateway/jobs": "batches idempotency responses tasks uploads webhooks",
    "gateway/jobs/batches": "completion_window input → model → token_quota turns → store → forecast → lines → run"
    " → maintenance → service → message_batches retry",
    "scheduler": "clock routing yaml_file → config request virtual_time → store → queue events registry reload"
    " → request_state tasks → deadlines → client control → holdings → planning worker → drivers",
    "engine": "interface → config imports progress closing suspension → gguf grammar step_time sequences streaming"
    " thread → sampling → modeled native static upstream vllm → embedding → factory",
    "loadtest": "machine progress random_weights traffic → client model_shapes"
    " → estimates running locustfile serving → reporting → checks commands simulation"
    " → calibration measure",
    "bench": "engines gpu_check simulator_accuracy store vllm_surface chaos → isolation"
    " → conformance fuzz images peers → facade fairness readme_figures",
    "scheduler/drivers": "calls steps streams",
    "engine/native": "device → kv → batch → attention → model sampling → cpu cuda → execution → startup",
}
# Where tensors live. What is elsewhere must start without torch; the model's trainer is a program of its own, and
# the device probe runs in a process of its own.
TORCH_ROOMS = {
    "engine.embedding",
    "engine.native",
    "engine.sampling",
    "engine.vllm",
    "demo_model",
    "loadtest.random_weights",
    "bench.engines.device_probe",
    "bench.engines.step_times",
}
# Decisions without clocks, I/O, logs, metrics or tensors: only drivers have those.
PURE_ROOMS = (
    "scheduler.config",
    "scheduler.request",
    "scheduler.request_state",
    "scheduler.deadlines",
    "scheduler.control",
    "scheduler.holdings",
    "scheduler.planning",
    "scheduler.drivers.steps.core",
    "scheduler.drivers.steps.engine_state",
    "scheduler.drivers.steps.isolation",
    "scheduler.drivers.steps.planner",
    "scheduler.drivers.steps.running_step",
    "scheduler.drivers.streams.core",
    "scheduler.drivers.streams.in_flight_limit",
    "scheduler.drivers.streams.step_times",
    "scheduler.drivers.streams.policy",
    "scheduler.drivers.streams.server_state",
    "scheduler.drivers.streams.streams",
    "scheduler.client.admission",
    "scheduler.client.rejection",
    "scheduler.client.ttft_forecast",
    "scheduler.client.inflight",
    "scheduler.client.open_requests",
    "scheduler.drivers.calls.busy_spells",
    "scheduler.drivers.calls.policy",
    "scheduler.drivers.calls.settled",
    "scheduler.tasks.task",
)
IMPURE = {"time", "datetime", "asyncio", "random", "logging", "structlog", "prometheus_client", "redis", "torch"}
ABSENT = {"torch", "transformers", "redis", "prometheus_client", "fastapi"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Every module that is imported anywhere in the file, also inside functions."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # `from scheduler.client import rejection` names a module; `from scheduler.config import Tier` does not.
            submodules = [f"{module}.{a.name}" for a in node.names if _is_module(f"{module}.{a.name}")]
            yield from submodules or [module]


@cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def top_level(name: str) -> str:
    return name.split(".")[0]


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


def levels_of(house: str) -> list[list[str]]:
    return [level.split() for level in HOUSES[house].split("→")]


def room_of(name: str, house: str) -> str | None:
    """The room of `house` that the module lies in; None: it lies in another house."""
    prefix = house.replace("/", ".") + "."
    return name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else None


def modules_in(rooms: Iterable[str]) -> list[Path]:
    return [path for path in MODULES if path not in INITS and is_within(name_of(path), set(rooms))]


def test_there_is_something_to_look_at() -> None:
    assert {top_level(name_of(path)) for path in MODULES} == set(PACKAGES)
    assert len(MODULES) > 50


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way_between_packages(package: str) -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in MODULES
        if top_level(name_of(path)) == package
        for imported in imports_of(path)
        if top_level(imported) in PACKAGES and not is_within(imported, MAY_IMPORT[package])
    ]
    assert not wrong


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_has_its_place_in_the_order(house: str) -> None:
    rooms = {room_of(name_of(path), house) for path in MODULES} - {None, "__main__"}
    assert sorted(room for level in levels_of(house) for room in level) == sorted(room for room in rooms if room)


@pytest.mark.parametrize("house", HOUSES)
def test_rooms_import_only_rooms_below_them(house: str) -> None:
    level_of = {room: number for number, level in enumerate(levels_of(house)) for room in level}
    wrong = []
    for path in MODULES:
        room = room_of(name_of(path), house)
        for imported in imports_of(path) if room in level_of else ():
            target = room_of(imported, house)
            if target in level_of and target != room and level_of[target] >= level_of[room]:
                wrong.append(f"{name_of(path)} imports {imported}")
    assert not wrong


def test_no_imports_run_in_a_circle() -> None:
    names = {name_of(path) for path in MODULES}
    try:
        TopologicalSorter({name_of(path): set(imports_of(path)) & names for path in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' → '.join(error.args[1])}")


def test_torch_stays_in_its_rooms() -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in MODULES
        if not is_within(name_of(path), TORCH_ROOMS)
        for imported in imports_of(path)
        if top_level(imported) == "torch"
    ]
    assert not wrong


def test_policy_knows_no_clock_no_store_and_no_metrics() -> None:
    assert all(modules_in([room]) for room in PURE_ROOMS)
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in modules_in(PURE_ROOMS)
        for imported in imports_of(path)
        if top_level(imported) in IMPURE
    ]
    assert not wrong


def import_without(absent: Collection[str], names: Sequence[str]) -> None:
    """Import modules in a fresh interpreter whose import system refuses packages, so that no detour counts either."""
    program = f"""
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {set(absent)!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
for name in {list(names)!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_pure_rooms_import_where_torch_redis_and_prometheus_are_absent() -> None:
    plain = [path for path in modules_in(("engine",)) if not is_within(name_of(path), TORCH_ROOMS)]
    import_without(ABSENT, [name_of(path) for path in [*modules_in(PURE_ROOMS), *plain]])


def test_a_supervisor_and_a_worker_start_without_what_only_others_need() -> None:
    """Each of these packages takes time of every start, and memory for as long as the process lives."""
    import_without({"fastapi", "torch", "transformers", "huggingface_hub", "httpx"}, ["tidegate.cli", "tidegate.serve"])
    import_without({"fastapi", "torch", "transformers"}, ["tidegate.cli", "tidegate.worker.engine_worker"])


def test_a_gateway_starts_without_what_few_gateways_need() -> None:
    """They are imported for the first request that needs one."""
    import_without(
        {"httpx", "llguidance", "openai"}, ["tidegate.cli", "tidegate.gateway.process", "tidegate.gateway.models"]
    )


def test_init_files_are_empty() -> None:
    assert INITS
    assert [name_of(path) for path in INITS if path.stat().st_size] == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [name_of(p) for p in MODULES if set(p.stem.split("_")) & VAGUE_NAMES] == []


def test_every_module_says_what_it_is() -> None:
    silent = [name_of(p) for p in MODULES if p not in INITS and not ast.get_docstring(tree_of(p))]
    assert silent == []


def test_nothing_happens_at_import() -> None:
    """At the top level of a module there are definitions and constants; `if __name__ == …` is the one door."""
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.Expr | ast.For | ast.While | ast.With | ast.Try) and not _is_docstring(node)
    ]
    assert calls == []


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
