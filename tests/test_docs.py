"""What the documentation says is true: links, paths, rooms, commands, flags, constants, keys and metrics exist."""

import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from gateway.http.metrics import GatewayMetrics, ModelMetrics
from loadtest.__main__ import main as loadtest_main
from scheduler import config
from scheduler.config import load_tiers
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.worker.metrics import SchedulerMetrics
from tests.test_architecture import HOUSES, ROOT
from tidegate.cli import main as tidegate_main

MAX_README_LINES = 160
LINK_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "demo_model/README.md")),
    *(ROOT / package / "README.md" for package in ("engine", "scheduler", "gateway", "tidegate", "loadtest", "bench")),
    *sorted((ROOT / "docs").glob("*.md")),
]
DOCS = (
    "api",
    "architecture",
    "batch",
    "benchmarks",
    "console",
    "controller",
    "deployment",
    "engines",
    "faq",
    "getting-started",
    "kubernetes",
    "loadtest",
    "operations",
    "security",
    "simulation",
    "tiers",
)
PACKAGES = sorted({*HOUSES, "loadtest", "bench", "tidegate"})  # each has a table of its rooms on the map
CODE_SUFFIXES = (".py", ".md", ".lua", ".cpp", ".h", ".toml")
MERMAID_KINDS = ("flowchart", "sequenceDiagram", "stateDiagram-v2", "classDiagram")
# Rooms in which every constant is explained in docs/controller.md.
EXPLAINED = ("scheduler/control", "scheduler/holdings", "scheduler/planning", "engine/step_time")
CONTROLLER = ROOT / "docs" / "controller.md"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(page: Path, language: str) -> list[str]:
    """The contents of the fenced code blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """The fragments by which GitHub links to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_rows(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each table row as (nearest heading above it, cells)."""
    heading = ""
    for line in prose(page).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            yield heading, [cell.strip() for cell in line.strip("|").split("|")]


def shell_lines(page: Path) -> Iterator[str]:
    """Every command that the page names, in a shell block or a code span, with continued lines joined."""
    for block in fences(page, "sh"):
        yield from block.replace("\\\n", " ").splitlines()
    yield from code_spans(page)


def test_every_page_is_there_and_the_readme_is_short() -> None:
    assert [name for name in DOCS if not (ROOT / "docs" / f"{name}.md").exists()] == []
    assert [page for page in PAGES if not page.exists()] == []
    assert len(text_of(ROOT / "README.md").splitlines()) <= MAX_README_LINES


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, fragment = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        is_page = target.suffix == ".md" and target.exists()
        if not target.exists() or (fragment and is_page and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_files_outside_docs_that_its_pages_link_to_are_on_the_site() -> None:
    hooks = ast.parse(text_of(ROOT / "docs" / "site_hooks.py"))
    (outside,) = (
        ast.literal_eval(n.value) for n in hooks.body if isinstance(n, ast.Assign) and "OUTSIDE" in ast.dump(n)
    )
    linked = {link for page in PAGES if page.parent.name == "docs" for link in LINK_OUTSIDE.findall(prose(page))}
    assert linked <= set(outside)


@each_page
def test_paths_in_code_spans_exist(page: Path) -> None:
    top_level = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".")}
    wrong = []
    for span in code_spans(page):
        first, slash, _ = span.partition("/")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) or span == "__init__.py":
            continue
        if (slash and first in top_level) or span.endswith(("/", *CODE_SUFFIXES)):
            wrong += [span] if not (ROOT / span).exists() and not (page.parent / span).exists() else []
    assert wrong == []


def test_blocks_of_code_parse() -> None:
    """YAML on every page, Python where newcomers copy it, and pictures of a kind that GitHub draws."""
    for page in PAGES:
        assert all(map(yaml.safe_load, fences(page, "yaml"))), page
        assert [block for block in fences(page, "mermaid") if not block.startswith(MERMAID_KINDS)] == []
    for name, language in (("README", "mermaid"), ("docs/architecture", "mermaid"), ("docs/getting-started", "python")):
        assert fences(ROOT / f"{name}.md", language), name
    for name in ("README", "docs/getting-started"):
        assert all(map(ast.parse, fences(ROOT / f"{name}.md", "python")))


# -- rooms -------------------------------------------------------------------------------------------------------------


def rooms_on_disk(package: str) -> set[str]:
    """The rooms of a package as paths: folders end with a slash, modules with .py."""
    entries = {entry for entry in (ROOT / package).iterdir() if not entry.name.startswith("__")}
    folders = {f"{package}/{entry.name}/" for entry in entries if (entry / "__init__.py").exists()}
    return folders | {f"{package}/{entry.name}" for entry in entries if entry.suffix == ".py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_has_every_room_and_no_other(package: str) -> None:
    architecture = ROOT / "docs" / "architecture.md"
    listed = {cells[0].strip("`") for heading, cells in table_rows(architecture) if heading == package}
    assert {name for name in listed if name.startswith(f"{package}/")} == rooms_on_disk(package)


@pytest.mark.parametrize("house", HOUSES)
def test_the_order_of_imports_is_the_enforced_one(house: str) -> None:
    assert f"`{HOUSES[house]}`" in text_of(ROOT / "docs" / "architecture.md")


# -- commands ----------------------------------------------------------------------------------------------------------


def make_targets() -> list[str]:
    lines = [line for page in PAGES for line in shell_lines(page)]
    return sorted({name for line in lines for name in re.findall(r"^make ([a-z][a-z-]*)", line.strip())})


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(make_targets())
    assert {"serve", "demo", "test"} <= named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


PROGRAMS = {
    "tidegate": "tidegate.cli",
    "python -m tidegate": "tidegate.cli",
    "tidegate loadtest": "loadtest.__main__",
    "python -m loadtest": "loadtest.__main__",
    "python -m bench": "bench.__main__",
    "python -m bench.gpu_check": "bench.gpu_check.__main__",
}


def invocation(line: str) -> tuple[str, list[str]] | None:
    """(program, arguments) of a command line of ours; None for any other line."""
    line = re.sub(r"^(\./)?\.venv/bin/", "", line.strip())
    for program in sorted(PROGRAMS, key=len, reverse=True):
        if f"{line} ".startswith(f"{program} "):
            return program, shlex.split(line.removeprefix(program), comments=True)
    return None


def invocations() -> list[tuple[str, str]]:
    lines = {line.strip() for page in PAGES for line in shell_lines(page)}
    return sorted({(found[0], line) for line in lines if (found := invocation(line)) is not None})


@cache
def help_of(program: str, command: str, main: Callable[[list[str]], Any]) -> str:
    """What `--help` prints; nothing is started."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"] if command else ["--help"])
    return printed.getvalue()


def main_of(program: str, command: str) -> Callable[[list[str]], Any]:
    if program == "tidegate" and command == "simulate":  # the command would replace this process
        return loadtest_main
    module = importlib.import_module(PROGRAMS[program])
    main: Callable[[list[str]], Any] = module.main
    return main


def fault_of(program: str, line: str) -> str | None:
    """Return what is wrong with a command line of `program`, if anything."""
    found = invocation(line)
    assert found is not None
    command, flags = _command_and_flags(program, found[1])
    text = help_of(program, command, main_of(program, command))
    if not text.startswith("usage: "):
        return f"{line}: there is no such command"
    known = set(re.findall(r"--[a-z][a-z-]*", text)) | {"--help", "--config"}
    return f"{line}: there is no {sorted(set(flags) - known)}" if set(flags) - known else None


def test_commands_and_their_flags_exist() -> None:
    assert [fault for program, line in invocations() if (fault := fault_of(program, line))] == []
    assert {"tidegate", "python -m loadtest", "python -m bench"} <= {program for program, _ in invocations()}
    assert tidegate_main is main_of("tidegate", "serve")
    assert fault_of("tidegate", "tidegate serve --no-such-flag 3")
    assert fault_of("python -m loadtest", "python -m loadtest no-such-command --seed 1")


def _command_and_flags(program: str, arguments: list[str]) -> tuple[str, list[str]]:
    command = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    flags = [word.partition("=")[0] for word in arguments if re.match(r"--[^ ]+$", word)]  # not quoted flags of others
    return command, flags


# -- constants, keys, metrics ------------------------------------------------------------------------------------------


def documented_constants() -> list[tuple[str, str, str]]:
    """(file, name, value) of each row of docs/controller.md that gives a constant. The file is the row's first cell, or
    stands in the heading above it."""
    found = []
    for heading, cells in table_rows(CONTROLLER):
        file = re.search(r"`([\w/]+\.py)`", f"{cells[0]} {heading}")
        name, value = (cells[1:3] if ".py`" in cells[0] else cells[:2]) if len(cells) > 2 else ("", "")
        if file and re.fullmatch(r"`[A-Z][A-Z0-9_]*`", name):
            found.append((file[1], name.strip("`"), value.strip("`")))
    return found


def test_constants_have_the_documented_value() -> None:
    for file, name, value in documented_constants():
        actual = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
        actual = tuple(actual.values()) if isinstance(actual, dict) else actual
        assert actual == eval(value, {"__builtins__": {}}), f"{file}: {name}"


@pytest.mark.parametrize("room", EXPLAINED)
def test_every_constant_is_documented(room: str) -> None:
    documented = {(file, name) for file, name, _ in documented_constants()}
    constants = {(str(path.relative_to(ROOT)), name) for path in (ROOT / room).glob("*.py") for name in _numbers(path)}
    assert constants
    assert constants - documented == set()


def _numbers(path: Path) -> Iterator[str]:
    """The public constants of a module that hold numbers."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    defined = re.findall(r"^([A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*)(?:: [^=\n]+)? = ", text_of(path), re.MULTILINE)
    for name in ", ".join(defined).split(", "):
        value = getattr(module, name, None)
        if isinstance(value, int | float) or (isinstance(value, dict) and value):
            yield name


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of tiers.yaml that `model` reads, dotted; the bounds of a knob count as one key."""
    for name, field in model.model_fields.items():
        name, kind = field.alias or name, field.annotation
        is_nested = name != "pinned" and isinstance(kind, type) and not issubclass(kind, config.Bounds)
        if is_nested and isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys_of(kind, f"{prefix}{name}.")
        elif name != "name":
            yield f"{prefix}{name}"


def test_every_key_of_a_tier_is_explained_and_no_other() -> None:
    rows = list(table_rows(ROOT / "docs" / "tiers.md"))
    documented = {cells[0].strip("`") for heading, cells in rows if heading == "The file, key by key"}
    switches = set(config.ControllerSwitches.model_fields)
    expected = set(keys_of(config.Tier)) | (set(config.TierSet.model_fields)) | switches
    assert {key for key in documented if re.fullmatch(r"[a-z_.0-9]+", key)} - {"key"} == expected


@pytest.mark.parametrize("recipe", range(5))
def test_recipes_change_the_shipped_tiers(recipe: int) -> None:
    section = text_of(ROOT / "docs" / "tiers.md").partition("\n## Recipes\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    shipped = yaml.safe_load(text_of(ROOT / "tiers.yaml"))
    changed = _merged(shipped, yaml.safe_load(blocks[recipe]))
    assert config.parse_tiers(changed) != config.parse_tiers(shipped)


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def test_every_metric_is_explained_and_no_other() -> None:
    registry = CollectorRegistry()
    for kind in (SchedulerMetrics, TaskMetrics):
        kind(registry, load_tiers(ROOT / "tiers.yaml"))
    gateway = GatewayMetrics()
    ModelMetrics(gateway.registry)
    families = [*registry.collect(), *gateway.registry.collect()]
    rows = table_rows(ROOT / "docs" / "operations.md")
    documented = {cells[0].strip("`") for heading, cells in rows if heading == "Metrics"}
    assert {name for name in documented if name.startswith("tidegate_")} == {family.name for family in families}
