"""`make gpu-check`: everything that only a GPU can tell, within ten minutes, unattended.

Runs a list of parts, each a command in a process group of its own with a time limit; one that fails does not stop the
others. Writes one log and one JSON with the parts' results and the goals they meet. Standard library only, so that it
says what is wrong also where packages are missing.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.parts import Outcome, Part, PartRunner

ROOT = Path(__file__).parents[1]
BUDGET_S = 570.0
PACKAGES = (
    "torch transformers numpy safetensors structlog msgspec httptools pydantic pydantic_settings yaml "
    "prometheus_client sortedcontainers llguidance pytest"
)
SHAPE = "8b"
SHAPE_BYTES = 20 << 30  # of its weights on disk, with room to spare
STREAMS = 64
OURS = ("tidegate", "tidegate-loop")
GOALS = {
    "throughput ÷ generate_batch": 1.3,
    "decode step's share of the memory floor": 0.6,
    "GPU busy share": 0.95,
}


def parts(out: Path, weights: Path) -> list[Part]:
    """What is run, in this order. A new step is one more entry here: name, command, limit in seconds."""
    python = sys.executable
    weights_flags = ("--shape", SHAPE, "--weights-dir", str(weights))
    systems = ",".join((*OURS, "generate_batch", "generate"))
    engine = (python, "-m", "loadtest", "engine", "--device", "cuda", "--systems", systems)
    probe = (python, "-m", "loadtest.engine_bench.device_probe")
    imports = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name); print(name, 'imported')"
    small, large = out / "engine-135m.json", out / "engine-8b.json"
    return [
        Part("packages", (python, "-c", imports, *PACKAGES.split()), 60),
        Part(
            "CUDA tests",
            (python, "-m", "pytest", *_pytest_flags(), "tests/engine/test_cuda.py", "tests/engine/cuda"),
            200,
            must_say=" passed",
        ),
        Part(
            "engine, 135m",
            (*engine, "--shape", "135m", "--weights-dir", str(weights), "--streams", "1,32", "--rounds", "2")
            + ("--work", "decode", "--json", str(small), "--logs", str(out / "logs")),
            120,
            result_file=small,
        ),
        Part(
            "engine, 8b",
            (*engine, *weights_flags, "--streams", f"1,{STREAMS}", "--rounds", "3", "--work", "decode,mixed")
            + ("--json", str(large), "--logs", str(out / "logs")),
            300,
            result_file=large,
        ),
        Part(
            "GPU busy",
            (*probe, "busy", "--device", "cuda", "--model", str(weights / f"{SHAPE}-bfloat16-1"))
            + ("--streams", str(STREAMS)),
            90,
            has_result_line=True,
        ),
    ]


def _pytest_flags() -> tuple[str, ...]:
    """Without the project's settings, which want plugins that may be missing and turn another torch's warnings into
    errors; and without the conftest above the engine's tests, which starts servers."""
    settings = ("-o", "addopts=", "-o", "filterwarnings=default", "--confcutdir", "tests/engine")
    return ("-q", "-rs", "--tb=short", "-p", "no:cacheprovider", *settings)


def measured_goals(results: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The figures of `GOALS`, by part's name; None where they were not measured. Ours is the engine by itself or
    behind the loop, whichever does more: the loop costs time, and hides some of the host's."""
    table = results.get("engine, 8b", {})
    decodes = [row for row in table.get("jobs", []) if (row["work"], row["streams"]) == ("decode", STREAMS)]
    rates = {row["system"]: row["tokens_per_s"]["value"] for row in decodes}
    ours = max((rate for system, rate in rates.items() if system in OURS), default=None)
    theirs = rates.get("generate_batch")
    steps = [row for row in table.get("steps", []) if row["system"] in OURS and row["streams"] == STREAMS]
    values = (
        ours / theirs if ours and theirs else None,
        max((row["share_of_floor"] for row in steps if row["share_of_floor"] is not None), default=None),
        results.get("GPU busy", {}).get("share_of_plain"),
    )
    return dict(zip(GOALS, values, strict=True))


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


def main(argv: Sequence[str] | None = None, find_gpu: Callable[[], str | None] = gpu_name) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="directory for the log and the JSON")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="packages for a machine without network")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts together")
    asked = parser.parse_args(argv)
    gpu = find_gpu()
    if gpu is None:
        print("gpu-check: torch sees no CUDA GPU on this machine, so there is nothing to check.", file=sys.stderr)
        return 2
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as site,
        tempfile.TemporaryDirectory(dir=place_for_weights()) as weights,
        (out / "gpu-check.log").open("w", encoding="utf-8") as log,
    ):
        trouble = install_wheels(asked.wheels, Path(site))
        print(f"{gpu}, Python {platform.python_version()}", *filter(None, [trouble]), file=log, flush=True)
        path = os.pathsep.join(filter(None, (str(ROOT), site, os.environ.get("PYTHONPATH"))))
        runner = PartRunner(ROOT, log, {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, asked.budget_s)
        outcomes = [runner.run(part) for part in parts(out, Path(weights))]
    goals = measured_goals({outcome.name: outcome.result for outcome in outcomes})
    _write(out / "gpu-check.json", gpu, outcomes, goals)
    print(_summary(outcomes, goals))
    return 0 if all(outcome.passed for outcome in outcomes) and all(map(_is_met, goals.items())) else 1


def _write(path: Path, gpu: str, outcomes: Sequence[Outcome], goals: dict[str, float | None]) -> None:
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "python": platform.python_version(),
        "parts": [asdict(outcome) for outcome in outcomes],
        "goals": {name: {"goal": GOALS[name], "measured": value} for name, value in goals.items()},
    }
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _summary(outcomes: Sequence[Outcome], goals: dict[str, float | None]) -> str:
    lines = [f"{outcome.name}: {outcome.verdict}" for outcome in outcomes]
    for name, value in goals.items():
        measured = "not measured" if value is None else f"{value:.2f}"
        lines.append(f"{name}: {measured}, goal {GOALS[name]}: {'met' if _is_met((name, value)) else 'MISSED'}")
    return "\n".join(lines)


def _is_met(goal: tuple[str, float | None]) -> bool:
    name, value = goal
    return value is not None and value >= GOALS[name]


if __name__ == "__main__":
    sys.exit(main())
