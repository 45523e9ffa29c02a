"""`python -m bench readme`: the figures of the README's table, all from one sitting.

Runs the commands that measure them, one after another and each in a process of its own, and makes one table of their
results. Knows the command lines, and where each result has its figure.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field

from bench.isolation.arms import (
    FIRST_COME,
    OURS,
    OURS_ALONE,
    PEER,
    PREMIUM_SERVICE_TIERS,
    STRICT,
    has_slo,
    read_shipped_tiers,
)
from bench.simulator_accuracy import Compared, compare_arm, read_result
from loadtest.reporting.formats import ABSENT, number, percent
from loadtest.reporting.record import Provenance, Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import print_progress
from loadtest.simulation.cost_card import load_cost_card

Json = dict[str, Any]
GATEWAY_S = 0.005  # seconds that HTTP and the gateway add to a first token, which the cost card leaves out
CHATS = ("--scale", "0.125", "--ttft-ms", "1000")
VLLM_FLAGS = "--dtype bfloat16 --max-model-len 2048"


class ReadmeFigures(BaseModel):
    """The figures of the README's table, from one sitting: isolation, on vLLM's kernels too, overload, decoding, and
    the simulator.

    Takes about half an hour. Without --vllm-python, the rows and comparisons with vLLM are left out.
    """

    vllm_python: Path | None = Field(None, description="Python of an environment with vLLM and Tidegate.")
    seconds: float = Field(80.0, gt=0, le=3600, description="Seconds measured of each arm.")
    seed: int = Field(1, ge=0, description="The same seed sends the same requests.")
    out: Path = Field(Path("results/readme"), description="Directory for the commands' results, and figures.json.")

    def cli_cmd(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "predict.yaml").write_text(yaml.safe_dump(strict_tiers()), encoding="utf-8")
        for name, command in self.commands().items():
            print_progress(f"{name}: {' '.join(command)}")
            subprocess.run([sys.executable, "-m", *command], check=True)
        results = {path.stem: json.loads(path.read_text("utf-8")) for path in self.out.glob("*.json")}
        card = load_cost_card(str(self.out / "card.json"))
        compared = compare_arm(read_result(self.out / "isolation.json"), OURS, card, GATEWAY_S)
        publish(readme_record(results, compared, self.seed), self.out / "figures.json")

    def commands(self) -> dict[str, list[str]]:
        """Return the command of each measurement, in order. The step log of the first one makes the cost card."""
        steps = (self.out / "steps.log").resolve()
        peer = [] if self.vllm_python is None else ["--vllm-python", str(self.vllm_python)]
        timing = ["--duration", f"{self.seconds:g}", "--seed", str(self.seed)]
        isolation = ["bench", "isolation", *timing, *CHATS, *peer, *(["--vllm-flags", VLLM_FLAGS] if peer else [])]
        arms = ["--arms", f"A1,{OURS_ALONE},{FIRST_COME},{OURS}", "--server-flags", f"--step-log {steps}"]
        overload = ["--experiment", "overload", "--arms", f"{STRICT},{OURS}", "--tiers", str(self.out / "predict.yaml")]
        on_vllm = ["bench", "isolation", *timing, *peer, "--engine", "vllm", "--scenario", "peers", "--scale", "1"]
        on_vllm += ["--context", "2048", "--clients", "1", "--load", "0.5", "--arms", f"{OURS_ALONE},{OURS}"]
        on_vllm += ["--server-flags", f"{VLLM_FLAGS} --kv-cache-mb 2048", "--vllm-flags", VLLM_FLAGS]
        engines = ["bench", "engines", "--rounds", "2", "--work", "decode", "--streams", "32", *peer]
        return {
            "isolation": [*isolation, *arms, "--search-seconds", "25", *self._json("isolation")],
            "overload": ["bench", "isolation", *timing, *CHATS, *overload, "--rounds", "1", *self._json("overload")],
            **({"on-vllm": [*on_vllm, *self._json("on-vllm")]} if peer else {}),
            "engines": [*engines, *self._json("engines")],
            "card": ["loadtest", "calibrate", "--step-log", str(steps), "--out", str(self.out / "card.json")],
        }

    def _json(self, name: str) -> list[str]:
        return ["--json", str(self.out / f"{name}.json")]


def strict_tiers() -> Json:
    """Return the shipped tiers in which requests are refused whose first token is predicted to miss the SLO."""
    document = read_shipped_tiers()
    for tier in document["tiers"].values():
        if has_slo(tier):
            tier["admission"] = {**(tier.get("admission") or {}), "predict": True}
    return document


def readme_record(results: dict[str, Json], compared: Sequence[Compared], seed: int) -> Record:
    rows = figures(results, compared)
    table = Table.of(("what", "Tidegate", "for comparison"), rows)
    return Record("The README's figures", [Section(table=table)], {"rows": rows}, Provenance.of_this_run("135m", seed))


def figures(results: dict[str, Json], compared: Sequence[Compared]) -> list[tuple[str, str, str]]:
    """Return the rows of the README's table. `results` has each command's result by its name."""
    isolation, overload, engines = (results[name] for name in ("isolation", "overload", "engines"))
    on_vllm = results.get("on-vllm")
    kept = isolation["versus_alone"][OURS]["bulk_kept"]
    rates = [f"{isolation['arms'][arm]['bulk_tokens_per_s']:.0f} tokens/s" for arm in (OURS, FIRST_COME)]
    systems = {job["system"]: job for job in engines["jobs"]}
    ratios = [
        f"{number(job['ours_over_it']['value'])} × {name}" for name, job in systems.items() if job["ours_over_it"]
    ]
    top = next(n for n, c in overload["scenario"]["classes"].items() if c["service_tier"] in PREMIUM_SERVICE_TIERS)
    missed = [percent(1 - overload["arms"][arm]["attainment"][top]["share"]) for arm in (OURS, STRICT)]
    ttft, gaps = ([number(ratio) for ratio in c.ratios()] for c in compared[:2])
    return [
        ("first token beside bulk ÷ alone, p50 and p99; in time", _beside_bulk(isolation, OURS), _peer(isolation)),
        *([("the same on vLLM's kernels", _beside_bulk(on_vllm, OURS), _peer(on_vllm))] if on_vllm else []),
        ("bulk beside that chat ÷ bulk alone with unlimited steps", number(kept), " against first come: ".join(rates)),
        ("load × 3 for a minute: missed SLOs in the top tier", missed[0], f"strict priority alone: {missed[1]}"),
        ("decoding 32 streams", f"{systems['tidegate']['tokens_per_s']['value']:.0f} tokens/s", ", ".join(ratios)),
        ("simulator ÷ measurement, first token p50 and p95", " and ".join(ttft), f"gaps: {' and '.join(gaps)}"),
    ]


def _peer(result: Json) -> str:
    return f"vLLM: {_beside_bulk(result, PEER)}" if PEER in result["arms"] else ABSENT


def _beside_bulk(result: Json, arm: str) -> str:
    ratios = (result["versus_alone"][arm][key] for key in ("ttft_p50", "ttft_p99"))
    shown = " and ".join(f"{r['value']:.2f} ({r['low']:.2f}–{r['high']:.2f})" if r else ABSENT for r in ratios)
    seen = result["arms"][arm]["attainment"].values()
    return f"{shown}; {percent(sum(a['met'] for a in seen) / sum(a['offered'] for a in seen))}"
