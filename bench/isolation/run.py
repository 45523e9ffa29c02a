"""The run of one experiment: its load is found, the arms are run, and the results are judged by the goals.

Knows the order of these steps; each step is in its own module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.isolation.admin import Systems, explanations
from bench.isolation.arms import OURS, OURS_ALONE, PEER, PEER_ALONE, PEER_BULK, ArmBuilder, Document
from bench.isolation.controls import Evidence
from bench.isolation.experiments import Experiment, with_load_profile
from bench.isolation.goals import judge
from bench.isolation.results.record import warnings_of
from bench.isolation.results.result import Result
from bench.isolation.rounds import Part, Progress, run_part, run_rounds
from bench.isolation.slos import is_premium, premium_ttft_ms, slos_by_class
from bench.isolation.summary import summarize_arms
from bench.isolation.tuning import Goodput, Trials
from loadtest.client.http import TargetError
from loadtest.client.runner import UNFINISHED, Timing
from loadtest.machine import hardware
from loadtest.traffic.scenario import Scenario, Targets
from scheduler.config import parse_tiers

WARM_UP_ROUND = 2000  # a round number that no arm uses, so that its requests differ


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """The configuration of a run: the experiment, its load, its arms and its durations.

    `clients` is the unit of load in multiples of the scenario's load; if it is None, the solo goodput is searched for
    and becomes the unit. `load` is the load in this unit; if it is None, the experiment's own load is used. `wanted`
    names the arms; if it is empty, all arms of the experiment are run.
    """

    experiment: Experiment
    scenario: Scenario  # with lengths already scaled
    length_scale: float
    ours: Document
    slo: Targets
    timing: Timing
    seed: int
    clients: float | None = None
    load: float | None = None
    wanted: Sequence[str] = ()
    search_s: float = 12.0
    search_budget_s: float = 180.0


async def run_experiment(config: ExperimentConfig, systems: Systems, progress: Progress) -> Result:
    """Run the experiment. Raises `TargetError` if a server does not answer or does not accept its tiers."""
    builder, slos = _arms_and_slos(config)
    trials = Trials(systems, config.scenario, slos, config.timing, config.seed, progress)
    # 1. warm up, since the first answers of a server are slow
    await _warm_up(config, systems, builder, progress)
    # 2. find the unit of load
    goodput, clients = await _unit_of_load(config, trials, builder)
    load = config.experiment.profile.base_load if config.load is None else config.load
    loaded = with_load_profile(config.scenario, config.experiment, clients, load, config.timing.part_s)
    # 3. run the arms
    arms, timing = builder.build_all(_arm_names(config, systems)), config.timing
    rounds = await run_rounds(systems, arms, loaded, timing, config.seed, progress)
    result = Result(
        config.experiment,
        loaded,
        config.length_scale,
        load,
        clients,
        timing,
        slos,
        rounds,
        summarize_arms(rounds, loaded, slos),
        goals=[],
        controls=[],
        goodput=goodput,
        explained=await explanations(systems.ours),
    )
    result.goals, result.controls = judge(_evidence(result))
    result.warnings = warnings_of(result)
    return result


def _arms_and_slos(config: ExperimentConfig) -> tuple[ArmBuilder, Mapping[str, Targets]]:
    """Return the builder of the arms, and the SLO of each interactive class in the arms' tiers."""
    ttft_ms, premium = None, None
    if config.experiment.has_premium:
        ttft_ms = premium_ttft_ms(config.scenario, config.ours, config.slo)
        premium = {} if ttft_ms is None else {"ttft_p99_ms": ttft_ms}
    builder = ArmBuilder(config.ours, config.slo, premium=premium)
    tiers = parse_tiers(builder.build(OURS).tiers)
    return builder, slos_by_class(config.scenario, tiers, config.slo, ttft_ms)


async def _warm_up(config: ExperimentConfig, systems: Systems, builder: ArmBuilder, progress: Progress) -> None:
    """Send a short load. Raises `TargetError` if no request of a class is served."""
    progress("warm-up")
    short = replace(config.timing, duration_s=config.search_s / 2, rounds=1)
    scenario, seed = config.scenario, config.seed
    for name in (OURS, PEER) if systems.peer is not None else (OURS,):
        part = await run_part(systems, builder.build(name), scenario, short, seed, WARM_UP_ROUND, "warm-up-")
        check_answers(part)


def check_answers(part: Part) -> None:
    """Raise `TargetError` if no request of a class was served."""
    for name, outcomes in part.run.outcomes.items():
        ended = [o for o in outcomes if o.error != UNFINISHED]
        if ended and not any(o.is_complete for o in ended):
            raise TargetError(f"{part.arm.title or part.arm.name}: no request of {name!r} was served: {ended[0].error}")


async def _unit_of_load(config: ExperimentConfig, trials: Trials, builder: ArmBuilder) -> tuple[Goodput | None, float]:
    """Return the result of the search for the solo goodput (None without a search), and the unit of load.

    The unit is a multiple of the scenario's load. It is `config.clients` if that is given, and 1 if the experiment
    keeps the scenario's load. Otherwise, it is the solo goodput, or the lowest load that was tried if no load held.
    """
    if config.clients is not None or config.experiment.has_own_load:
        return None, config.clients or 1.0
    usual = replace(config.timing, duration_s=config.search_s, rounds=1)
    searching = replace(trials, timing=usual)
    goodput = await searching.search_goodput(builder.build(OURS_ALONE), config.search_budget_s)
    return goodput, goodput.clients or min(p.clients for p in goodput.probes)


def _arm_names(config: ExperimentConfig, systems: Systems) -> list[str]:
    names = list(config.wanted or config.experiment.arms)
    if systems.peer is not None:
        names += [PEER_ALONE, PEER_BULK, PEER] if config.experiment.name in ("isolation", "frontier") else [PEER]
    return names


def _evidence(result: Result) -> Evidence:
    classes = result.scenario.with_role("interactive")
    spike = result.experiment.profile.spike(result.timing.part_s)
    return Evidence(
        result.experiment.name,
        result.arms,
        solo_load=result.solo_load,
        factor=result.experiment.profile.factor,
        higher_for_s=spike.for_s if spike else 0.0,
        on_gpu="NVIDIA" in hardware(),
        top_class=next((c.name for c in classes if is_premium(c)), classes[0].name),
    )
