"""`python -m bench batch-deadlines`: jobs with windows, beside chat, with deadlines and as best effort.

Simulates a server in virtual time: chats, a large job without haste, and jobs with short windows. The scheduler is the
shipped one. Knows arms and tables; `jobs` knows how a job runs.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from pydantic import AliasChoices, BaseModel, Field

from bench.batch_deadlines.hindsight import wrongly_refused
from bench.batch_deadlines.jobs import Job, JobOutcome, JobRunner
from loadtest.progress import progress
from loadtest.reporting.formats import milliseconds, percent
from loadtest.reporting.output import publish
from loadtest.reporting.record import Record, Section, Table
from loadtest.running import print_progress
from loadtest.simulation.clients import SimulatedClients
from loadtest.simulation.command import log_errors_only
from loadtest.simulation.cost_card import CostCard, load_cost_card
from loadtest.simulation.deployment import Setting, start_deployment
from loadtest.simulation.experiment import find_tiers
from loadtest.simulation.observation import Observation
from loadtest.simulation.summary import spread
from loadtest.simulation.traffic import scenario_traffic
from loadtest.traffic.scenario import Scenario
from scheduler.config import TierSet
from scheduler.virtual_time import run_virtual

CYCLE = [{"for_s": 150, "factor": 1.5}, {"for_s": 150, "factor": 0.5}]  # of the chats

LARGE = "large"  # name of the large job


@dataclass(frozen=True, slots=True)
class Row:
    """One arm: jobs with short windows, the large job's lines, and the chats."""

    arm: str
    admitted: int
    on_time: int
    refused: int
    wrongly_refused: int  # at most: they would have ended in time, if no time were lost
    large_job_lines: int
    chat_first_tokens_in_time: float
    chat_ttft_p99_s: float | None
    chat_itl_p99_s: float | None

    @property
    def missed_share(self) -> float:
        return 1 - self.on_time / self.admitted if self.admitted else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is simulated: chats a second, and jobs with short windows beside a large one."""

    tiers: TierSet
    card: CostCard
    duration_s: float = 1800.0
    chats_per_s: float = 0.7
    jobs: int = 16
    windows_s: tuple[int, ...] = (120, 300)
    lines: tuple[int, int] = (100, 600)
    large_lines: int = 20_000
    seed: int = 1

    def make_jobs(self) -> list[Job]:
        """Return a large job with a day, and jobs with short windows that come at random."""
        rng = Random(self.seed)
        last_s = self.duration_s - max(self.windows_s)
        found = [Job(LARGE, 0.0, 86_400, self.large_lines)]
        for number in range(self.jobs):
            at_s = rng.uniform(0.0, last_s)
            found.append(Job(f"job-{number}", at_s, rng.choice(self.windows_s), rng.randint(*self.lines)))
        return found

    def scenario(self) -> Scenario:
        chat = {
            "role": "interactive",
            "service_tier": "default",
            "arrivals": {"rate_per_s": self.chats_per_s, "cycle": CYCLE},
            "prompt_tokens": {"min": 32, "max": 128},
            "output_tokens": {"min": 16, "max": 96},
        }
        return Scenario.model_validate({"classes": {"chat": chat}})


def measure(plan: Plan, keeps_deadlines: bool) -> Row:
    """Run the plan in virtual time, and return what came of it."""
    return run_virtual(_measure(plan, keeps_deadlines))


async def _measure(plan: Plan, keeps_deadlines: bool) -> Row:
    traffic = scenario_traffic(plan.scenario(), plan.tiers, plan.duration_s, plan.seed)
    observation = Observation(plan.duration_s, traffic.classes)
    deployment = await start_deployment(Setting(plan.tiers, plan.card, seed=plan.seed), observation)
    clients = SimulatedClients(deployment, observation)
    clients.fill(traffic)
    runner = JobRunner(deployment, keeps_deadlines, Random(plan.seed))
    planned = plan.make_jobs()
    jobs = asyncio.create_task(runner.run(planned))
    await deployment.clock.sleep(deployment.begins_s - deployment.clock.now())
    await clients.offer(traffic.arrivals, plan.duration_s)
    await clients.finish(drain_s=60.0)
    jobs.cancel()
    await asyncio.wait([jobs])
    known = runner.known_jobs([job for job in planned if job.name != LARGE])
    await deployment.end()
    arm = "deadlines" if keeps_deadlines else "best effort"
    return _row(arm, runner.outcomes, wrongly_refused(known, runner.left), observation, plan)


def _row(arm: str, outcomes: Sequence[JobOutcome], wrong: int, observation: Observation, plan: Plan) -> Row:
    short = [outcome for outcome in outcomes if outcome.name != LARGE]
    admitted = [outcome for outcome in short if outcome.admitted]
    target_ms = plan.tiers[plan.tiers.default_tier].slo.ttft_p99_ms or 0.0
    ttfts = [record.ttft_s for record in observation.requests]
    in_time = sum(ttft is not None and 1000 * ttft <= target_ms for ttft in ttfts)
    return Row(
        arm,
        admitted=len(admitted),
        on_time=sum(outcome.is_on_time for outcome in admitted),
        refused=len(short) - len(admitted),
        wrongly_refused=wrong,
        large_job_lines=sum(outcome.finished for outcome in outcomes if outcome.name == LARGE),
        chat_first_tokens_in_time=in_time / len(ttfts),
        chat_ttft_p99_s=spread(ttft for ttft in ttfts if ttft is not None).p99,
        chat_itl_p99_s=spread(gap for gaps in observation.gaps_s.values() for gap in gaps).p99,
    )


class BatchDeadlines(BaseModel):
    """Simulate jobs with short windows beside chat: with deadlines, and as best effort. Prints a table."""

    tiers: str = Field("", description="A tiers file; unset: the shipped tiers.yaml.")
    model_shape: str = Field("135m-cpu", description="A shipped cost card, or one that `loadtest calibrate` wrote.")
    duration: float = Field(1800.0, gt=300, le=86400, description="Virtual seconds.")
    chats: float = Field(0.7, gt=0, description="Chats a second on average; they swing by half.")
    jobs: int = Field(16, ge=1, description="Jobs with windows of 2 or 5 minutes, beside a large one with a day.")
    seeds: list[int] = Field([1, 2, 3], description="The same seed gives the same table; may be repeated.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the table's values to this file."
    )

    def cli_cmd(self) -> None:
        log_errors_only()
        tiers, card = find_tiers(self.tiers), load_cost_card(self.model_shape)
        rows: dict[int, list[Row]] = {}
        with progress("runs", 2 * len(self.seeds)) as show:
            for seed in self.seeds:
                plan = Plan(tiers, card, self.duration, self.chats, self.jobs, seed=seed)
                rows[seed] = []
                for keeps_deadlines in (True, False):
                    print_progress(f"seed {seed}: {'deadlines' if keeps_deadlines else 'best effort'}")
                    rows[seed].append(measure(plan, keeps_deadlines))
                    show(sum(map(len, rows.values())))
        publish(record_of(rows), self.json_file)


def record_of(rows: dict[int, list[Row]]) -> Record:
    latencies = ("chats in time", "TTFT p99 ms", "ITL p99 ms")
    header = ("jobs", "admitted", "refused", "wrongly", "on time", "large job", *latencies)
    sections = [Section(f"seed {seed}", Table.of(header, map(_cells, found))) for seed, found in rows.items()]
    data = {str(seed): [asdict(row) for row in found] for seed, found in rows.items()}
    return Record("Jobs with windows of 2 and 5 minutes, beside chat and a large job", sections, data)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.arm,
        str(row.admitted),
        str(row.refused),
        str(row.wrongly_refused),
        percent(1 - row.missed_share),
        f"{row.large_job_lines} lines",
        percent(row.chat_first_tokens_in_time),
        milliseconds(row.chat_ttft_p99_s),
        milliseconds(row.chat_itl_p99_s),
    )
