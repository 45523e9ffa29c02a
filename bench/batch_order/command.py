"""`python -m bench batch-order`: batch lines in the order that the gateway gives them, against the order of the input.

Each job runs in both orders in turn on one engine. Each run has a cache salt of its own, so that it finds nothing of
earlier runs in the prefix cache. The order is the one that the gateway writes for the same input. With `--simulated`,
the engine is modeled in virtual time, without noise.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.batch_order.jobs import JOBS, make_job_lines
from bench.batch_order.worker import BatchWorker, LineFailed, Outcome, modeled_engine, request_of
from bench.engines.ratios import paired_ratio
from bench.engines.roofline import ModelShape
from engine.config import EngineConfig
from engine.factory import build_engine
from engine.interface import Engine
from gateway.batches.order import read_ordered_chunks, write_order
from loadtest.model_command import ModelCommand
from loadtest.model_shapes import ShapeError, read_config
from loadtest.reporting.formats import interval, percent
from loadtest.reporting.record import Record, Section, Table
from loadtest.running import one_sentence, print_progress
from loadtest.shipped_tiers import shipped_tiers_path
from loadtest.simulation.command import log_errors_only
from loadtest.simulation.cost_card import CostCardError, load_cost_card
from scheduler.clock import Clock, SystemClock
from scheduler.config import load_tiers
from scheduler.virtual_time import VirtualClock, run_virtual

ORDERS = ("input", "ordered")

Lines = Sequence[dict[str, Any]]
Measure = Callable[[Lines, str], Outcome]  # from the lines in their order, and a cache salt


class BatchOrder(ModelCommand):
    """Batch lines in the gateway's order, against the order of the input: tokens per second, prefix cache hits."""

    jobs: str = Field(",".join(JOBS), description="The jobs to measure.")
    lines: int = Field(600, ge=2, le=50_000, description="Lines of a job.")
    rounds: int = Field(3, ge=1, le=100, description="Times that each job runs in each order.")
    kv_tokens: int = Field(16_384, ge=2048, description="Tokens for which the engine has KV memory.")
    context: int = Field(2048, ge=64, description="Context to which the lengths of the lines are scaled.")
    in_flight: int = Field(256, ge=1, description="Lines that a gateway runs at the same time.")
    simulated: str = Field("", description="A cost card, to model the engine in virtual time; default: a real engine.")

    def cli_cmd(self) -> None:
        log_errors_only()
        with one_sentence(ShapeError, CostCardError, LineFailed, ValueError, said_by="batch-order"):
            names = [name.strip() for name in self.jobs.split(",")]
            if unknown := [name for name in names if name not in JOBS]:
                raise ValueError(f"there is no job {unknown[0]!r}: {', '.join(JOBS)} are known")
            outcomes, model = self._simulate(names) if self.simulated else self._measure(names)
        self.conclude(order_record(outcomes, self.kv_tokens), model)

    def _simulate(self, names: Sequence[str]) -> tuple[Mapping[str, list[dict[str, Outcome]]], str]:
        card = load_cost_card(self.simulated)

        def measure(lines: Lines, salt: str) -> Outcome:
            async def run() -> Outcome:
                clock = VirtualClock()
                worker = await self._worker(modeled_engine(card, self.kv_tokens, clock), clock)
                return await self._run(worker, lines, salt, clock)

            return run_virtual(run())

        return self._compare(names, measure), f"modeled: {card.name}"

    def _measure(self, names: Sequence[str]) -> tuple[Mapping[str, list[dict[str, Outcome]]], str]:
        model = self.model_dir()
        shape = ModelShape.from_config(read_config(model), self.dtype)
        if shape is None:
            raise ValueError(f"{model}: the size of its KV is unknown")
        config = EngineConfig(
            model=str(model),
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.context,
            kv_cache_bytes=self.kv_tokens * shape.kv_token_bytes,
            num_threads=self.num_threads,
        )
        engine, clock = build_engine(config), SystemClock()
        try:
            with asyncio.Runner() as runner:
                worker = runner.run(self._worker(engine, clock))
                measure = lambda lines, salt: runner.run(self._run(worker, lines, salt, clock))  # noqa: E731
                return self._compare(names, measure), str(model)
        finally:
            engine.close()

    async def _worker(self, engine: Engine, clock: Clock) -> BatchWorker:
        worker = BatchWorker(engine, load_tiers(shipped_tiers_path()), clock)
        await worker.start()
        return worker

    async def _run(self, worker: BatchWorker, lines: Lines, salt: str, clock: Clock) -> Outcome:
        now_ms = clock.wall_ms()
        requests = [
            request_of(line["body"]["prompt"], line["body"]["max_tokens"], i, salt, worker.tier, now_ms)
            for i, line in enumerate(lines)
        ]
        return await worker.run(requests, self.in_flight)

    def _compare(self, names: Sequence[str], measure: Measure) -> dict[str, list[dict[str, Outcome]]]:
        """Return the outcomes of each job: for each round, those of both orders."""
        outcomes: dict[str, list[dict[str, Outcome]]] = {name: [] for name in names}
        for name in names:
            lines = make_job_lines(name, self.lines, self.context, self.seed)
            orders = {"input": lines, "ordered": ordered(lines)}
            for round_ in range(self.rounds):
                in_turn = ORDERS if round_ % 2 == 0 else ORDERS[::-1]
                found = {order: measure(orders[order], f"{name}-{round_}-{order}") for order in in_turn}
                outcomes[name].append(found)
                rates = ", ".join(f"{order} {found[order].tokens_per_s:.0f} tokens/s" for order in ORDERS)
                print_progress(f"{name}, round {round_ + 1}: {rates}")
        return outcomes


def ordered(lines: Lines) -> Lines:
    """Return the lines in the order in which a gateway runs them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_order(path)
        return [lines[line.number - 1] for chunk in read_ordered_chunks(path, ()) for line in chunk]


def order_record(outcomes: Mapping[str, list[dict[str, Outcome]]], kv_tokens: int) -> Record:
    header = ("job", "tokens/s in the input's order", "ordered", "ordered ÷ input", "cache hits", "ordered ")
    rows, data = [], {}
    for name, rounds in outcomes.items():
        rates = {order: [found[order].tokens_per_s for found in rounds] for order in ORDERS}
        hits = {order: sum(found[order].hit_rate for found in rounds) / len(rounds) for order in ORDERS}
        means = [f"{sum(rates[order]) / len(rounds):.0f}" for order in ORDERS]
        ratio = paired_ratio(rates["ordered"], rates["input"])
        rows.append((name, *means, interval(ratio), *(percent(hits[order]) for order in ORDERS)))
        data[name] = {"tokens_per_s": rates, "hit_rate": hits, "ratio": ratio.value}
    note = f"KV memory for {kv_tokens} tokens. Tokens are those of prompts and outputs, whether computed or cached."
    return Record(sections=[Section(table=Table.of(header, rows), notes=(note,))], data={"jobs": data})
