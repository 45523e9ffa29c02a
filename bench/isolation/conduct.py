"""One experiment from its beginning to its result: tune, run the arms, judge.

Knows the order of things; what each of them does is in a module of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.isolation.arms import OURS, OURS_ALONE, PEER, PEER_ALONE, PEER_BULK, STATIC, ArmBuilder, Document
from bench.isolation.attainment import settling_s
from bench.isolation.caveats import warnings_of
from bench.isolation.controls import Evidence
from bench.isolation.experiment import Part, Progress, run_part, run_rounds
from bench.isolation.goals import judge
from bench.isolation.goodput import Goodput
from bench.isolation.promises import is_premium, premium_ttft_ms, promises_by_class
from bench.isolation.result import Result
from bench.isolation.shapes import Experiment, shaped
from bench.isolation.summary import met_by_arrival, summarize_arms
from bench.isolation.systems import Systems, explanations
from bench.isolation.tuning import BUDGETS, Sweep, Trials
from loadtest.client.http import TargetError
from loadtest.client.runner import UNFINISHED, Timing
from loadtest.machine import hardware
from loadtest.traffic.scenario import Scenario, Targets
from scheduler.config import parse_tiers

SETTLED_SHARE, SETTLED_BIN_S = 0.97, 2.0
WARM_UP_ROUND = 2000  # of no arm


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """What is run, and on what. `clients` None: the solo goodput is searched for. `load` None: as the experiment has
    it. `wanted` empty: all of its arms."""

    experiment: Experiment
    scenario: Scenario  # lengths scaled already
    length_scale: float
    ours: Document
    promise: Targets
    timing: Timing
    seed: int
    clients: float | None = None
    load: float | None = None
    wanted: Sequence[str] = ()
    search_s: float = 12.0
    search_budget_s: float = 180.0
    sweep_s: float = 8.0


async def conduct(conditions: ExperimentConfig, systems: Systems, progress: Progress) -> Result:
    """Raises `TargetError` where a server does not answer or does not take its tiers."""
    builder, promises = _promised(conditions)
    trials = Trials(systems, conditions.scenario, promises, conditions.timing, conditions.seed, progress)
    # 1. first answers of a server are not what is measured
    await _warm_up(conditions, systems, builder, progress)
    # 2. the unit of load
    goodput, clients = await _unit_of_load(conditions, trials, builder)
    load = conditions.experiment.shape.base_load if conditions.load is None else conditions.load
    loaded = shaped(conditions.scenario, conditions.experiment, clients, load, conditions.timing.part_s)
    # 3. the best that a fixed budget can do
    names, sweep = _arm_names(conditions, systems), None
    if STATIC in names:
        sweep = await _sweep(conditions, replace(trials, scenario=loaded), builder)
        builder = replace(builder, budget=sweep.best.budget)
    # 4. the arms
    arms, timing = builder.build_all(names), conditions.timing
    rounds = await run_rounds(systems, arms, loaded, timing, conditions.seed, progress)
    result = Result(
        conditions.experiment,
        loaded,
        conditions.length_scale,
        load,
        clients,
        timing,
        promises,
        rounds,
        summarize_arms(rounds, loaded, promises),
        goals=[],
        controls=[],
        goodput=goodput,
        sweep=sweep,
        explained=await explanations(systems.ours),
    )
    result.settling_s = _settling(result)
    result.goals, result.controls = judge(_evidence(result))
    result.warnings = warnings_of(result)
    return result


def _promised(conditions: ExperimentConfig) -> tuple[ArmBuilder, Mapping[str, Targets]]:
    """The arms' tiers, and what the interactive classes are judged by: what these tiers promise."""
    ttft_ms, premium = None, None
    if conditions.experiment.has_premium:
        ttft_ms = premium_ttft_ms(conditions.scenario, conditions.ours, conditions.promise)
        premium = {} if ttft_ms is None else {"ttft_p99_ms": ttft_ms}
    builder = ArmBuilder(conditions.ours, conditions.promise, premium=premium)
    tiers = parse_tiers(builder.build(OURS).tiers)
    return builder, promises_by_class(conditions.scenario, tiers, conditions.promise, ttft_ms)


async def _warm_up(conditions: ExperimentConfig, systems: Systems, builder: ArmBuilder, progress: Progress) -> None:
    """Raises `TargetError` where a class is refused whatever it sends: hours of that would measure nothing."""
    progress("warm-up")
    short = replace(conditions.timing, duration_s=conditions.search_s / 2, rounds=1)
    scenario, seed = conditions.scenario, conditions.seed
    for name in (OURS, PEER) if systems.peer is not None else (OURS,):
        part = await run_part(systems, builder.build(name), scenario, short, seed, WARM_UP_ROUND, "warm-up-")
        _check_answers(part)


def _check_answers(part: Part) -> None:
    for name, outcomes in part.run.outcomes.items():
        ended = [o for o in outcomes if o.error != UNFINISHED]
        if ended and not any(o.is_complete for o in ended):
            raise TargetError(f"{part.arm.title}: no request of {name!r} was served: {ended[0].error}")


async def _unit_of_load(
    conditions: ExperimentConfig, trials: Trials, builder: ArmBuilder
) -> tuple[Goodput | None, float]:
    """In multiples of the scenario's load: as given, or the solo goodput and how it was found. Where no load held, the
    least that was tried."""
    if conditions.clients is not None:
        return None, conditions.clients
    usual = replace(conditions.timing, duration_s=conditions.search_s, rounds=1)
    searching = replace(trials, timing=usual)
    goodput = await searching.search_goodput(builder.build(OURS_ALONE), conditions.search_budget_s)
    return goodput, goodput.clients or min(p.clients for p in goodput.probes)


async def _sweep(conditions: ExperimentConfig, trials: Trials, builder: ArmBuilder) -> Sweep:
    short = replace(conditions.timing, duration_s=conditions.sweep_s, rounds=1)
    return await replace(trials, timing=short).sweep_static_budget(builder.build(STATIC), BUDGETS)


def _arm_names(conditions: ExperimentConfig, systems: Systems) -> list[str]:
    names = list(conditions.wanted or conditions.experiment.arms)
    if systems.peer is not None:
        names += [PEER_ALONE, PEER_BULK, PEER] if conditions.experiment.name == "isolation" else [PEER]
    return names


def _settling(result: Result) -> dict[str, float]:
    spike = result.experiment.shape.spike(result.timing.part_s)
    if result.experiment.name != "step" or spike is None:
        return {}
    return {
        name: settling_s(
            met_by_arrival(parts, result.scenario, result.promises),
            spike.at_s,
            result.timing.part_s,
            SETTLED_SHARE,
            SETTLED_BIN_S,
        )
        for name, parts in result.rounds.parts.items()
    }


def _evidence(result: Result) -> Evidence:
    classes = result.scenario.with_role("interactive")
    spike = result.experiment.shape.spike(result.timing.part_s)
    return Evidence(
        result.experiment.name,
        result.arms,
        solo_load=result.solo_load,
        factor=result.experiment.shape.factor,
        higher_for_s=spike.for_s if spike else 0.0,
        on_gpu="NVIDIA" in hardware(),
        top_class=next((c.name for c in classes if is_premium(c)), classes[0].name),
        settling_s=result.settling_s,
    )
