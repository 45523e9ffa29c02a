"""The worker's metric families, as a scrape sees them."""

import asyncio
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.config import parse_tiers
from scheduler.control.knobs import Decision
from scheduler.control.windows import WINDOW_S
from scheduler.holdings.report import DraftUse, Ended, Report
from scheduler.request_state import Sample
from scheduler.worker.metrics import SchedulerMetrics
from tests.scheduler.builders import make_state, make_tiers
from tests.scheduler.world import World, played_by, run_world

HISTOGRAMS = {
    "tidegate_time_to_first_token_seconds",
    "tidegate_inter_token_latency_seconds",
    "tidegate_e2e_request_latency_seconds",
    "tidegate_request_queue_time_seconds",
    "tidegate_first_token_service_seconds",
    "tidegate_reaction_steps",
    "tidegate_step_batch_size",
    "tidegate_step_seconds",
}
GAUGES = {
    "tidegate_num_requests_waiting",
    "tidegate_num_requests_running",
    "tidegate_num_requests_paused",
    "tidegate_num_requests_swapped",
    "tidegate_kv_cache_usage_ratio",
    "tidegate_slo_target_seconds",
    "tidegate_slo_observed_seconds",
    "tidegate_slo_attainment_ratio",
    "tidegate_controller_max_wait_seconds",
    "tidegate_controller_batch_size",
    "tidegate_controller_batch_tokens",
    "tidegate_controller_margin_ratio",
    "tidegate_controller_overloaded",
    "tidegate_missing_deadlines",
    "tidegate_arrivals_per_second",
    "tidegate_kv_reserve_blocks",
    "tidegate_step_time_error_ratio",
    "tidegate_bulk_slowdown_ratio",
    "tidegate_max_slowdown_ratio",
}
COUNTERS = {
    "tidegate_slo_misses",
    "tidegate_num_preemptions",
    "tidegate_prompt_tokens",
    "tidegate_generation_tokens",
    "tidegate_prefix_cache_queries",
    "tidegate_prefix_cache_hits",
    "tidegate_requests_finished",
    "tidegate_controller_decisions",
    "tidegate_step_suspensions",
    "tidegate_dropped_step_seconds",
    "tidegate_engine_seconds",
    "tidegate_recomputed_tokens",
    "tidegate_restored_tokens",
    "tidegate_spec_decode_num_draft_tokens",
    "tidegate_spec_decode_num_accepted_tokens",
}


def make_metrics() -> tuple[SchedulerMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return SchedulerMetrics(registry, make_tiers()), registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"tidegate_{name}", labels)


def total(registry: CollectorRegistry, names: Iterable[str], **labels: str) -> list[float | None]:
    return [value(registry, name, **labels) for name in names]


def test_the_families_and_their_types_are_those_agreed() -> None:
    _, registry = make_metrics()
    families = text_string_to_metric_families(generate_latest(registry).decode())
    types = {f.name: f.type for f in families if not f.name.endswith("_created")}
    agreed = {"histogram": HISTOGRAMS, "gauge": GAUGES, "counter": COUNTERS}
    assert types == {name: kind for kind, names in agreed.items() for name in names}


def test_counters_and_targets_are_there_before_the_first_event() -> None:
    _, registry = make_metrics()
    for tier in ("realtime", "bulk", "batch"):
        assert value(registry, "num_preemptions_total", tier=tier, mode="pause") == 0
        assert value(registry, "requests_finished_total", tier=tier, reason="cancelled") == 0
        assert total(registry, ["prompt_tokens_total", "generation_tokens_total"], tier=tier) == [0, 0]
    assert value(registry, "slo_target_seconds", tier="realtime", metric="ttft", quantile="0.99") == 0.5
    assert value(registry, "slo_target_seconds", tier="bulk", metric="ttft", quantile="0.99") is None


def test_a_report_becomes_latencies_and_counts() -> None:
    metrics, registry = make_metrics()
    samples = [Sample("queue", "bulk", 0.1), Sample("ttft", "bulk", 0.2), Sample("itl", "bulk", 0.01)]
    ended = [Ended("bulk", "length", prompt_tokens=32, output_tokens=2, met_slo=True)]
    tokens = Counter({"bulk": 5})  # several of them came in one step
    metrics.record_report(Report(samples=[*samples, Sample("e2e", "bulk", 0.21)], tokens=tokens, ended=ended))
    sums = total(
        registry,
        (
            "request_queue_time_seconds_sum",
            "time_to_first_token_seconds_sum",
            "inter_token_latency_seconds_sum",
            "e2e_request_latency_seconds_sum",
            "generation_tokens_total",
            "prompt_tokens_total",
        ),
        tier="bulk",
    )
    assert sums == [0.1, 0.2, 0.01, 0.21, 5, 32]
    assert value(registry, "requests_finished_total", tier="bulk", reason="length") == 1


def test_drafts_are_counted_by_tier() -> None:
    metrics, registry = make_metrics()
    names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    assert total(registry, names, tier="realtime") == [0, 0]
    metrics.record_report(Report(drafts=[DraftUse(make_state(), 5, 2), DraftUse(make_state(), 3, 0)]))
    assert total(registry, names, tier="realtime") == [8, 2]


def test_what_takes_longer_than_the_slo_is_counted_where_there_is_one() -> None:
    metrics, registry = make_metrics()
    assert value(registry, "slo_misses_total", tier="realtime", metric="itl") == 0
    assert value(registry, "slo_misses_total", tier="bulk", metric="itl") is None
    seconds = {"ttft": (0.49, 0.5, 0.51, 9.0), "itl": (0.05, 0.2)}
    samples = [Sample(kind, tier, s) for kind, all_s in seconds.items() for s in all_s for tier in ("realtime", "bulk")]
    metrics.record_report(Report(samples=[*samples, Sample("e2e", "realtime", 99.0)]))
    missed = [value(registry, "slo_misses_total", tier="realtime", metric=metric) for metric in ("ttft", "itl")]
    assert missed == [2, 1]
    metrics.reconfigure(make_tiers(realtime={"slo": {"ttft_p99_ms": 10_000}}))
    metrics.record_report(Report(samples=[Sample("ttft", "realtime", 9.0), Sample("itl", "realtime", 9.0)]))
    assert [value(registry, "slo_misses_total", tier="realtime", metric=metric) for metric in ("ttft", "itl")] == [2, 1]


def test_a_decision_is_counted_with_its_direction_and_signal() -> None:
    metrics, registry = make_metrics()
    metrics.record_decisions([Decision("bulk", "batch_size", 64, 32, "slo_misses", "interactive tiers miss")])
    labels = {"tier": "bulk", "knob": "batch_size", "direction": "down", "reason": "slo_misses"}
    assert value(registry, "controller_decisions_total", **labels) == 1


@played_by(run_world)
async def test_observed_latencies_disappear_when_there_is_nothing_to_observe(world: World) -> None:
    for i in range(30):
        await world.ask(f"r{i}", max_tokens=4)
    await world.clock.sleep(1.0)
    observed = {"tier": "realtime", "metric": "ttft", "quantile": "0.99"}
    assert value(world.prometheus, "slo_observed_seconds", **observed) is not None
    assert value(world.prometheus, "slo_attainment_ratio", tier="realtime") == 1.0
    await world.clock.sleep(WINDOW_S + 1.0)
    assert value(world.prometheus, "slo_observed_seconds", **observed) is None
    assert value(world.prometheus, "slo_attainment_ratio", tier="realtime") is None
    assert value(world.prometheus, "slo_target_seconds", **observed) == 0.5


@played_by(run_world)
async def test_gauges_show_the_present_and_preemptions_are_counted_once(world: World) -> None:
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=150)) for i in range(3)]
    await world.clock.sleep(0.2)
    await world.ask("rt", max_tokens=4)
    await world.clock.sleep(1.5)
    registry = world.prometheus
    assert value(registry, "num_requests_running", tier="bulk") == 3
    assert value(registry, "num_requests_waiting", tier="bulk") == 0
    assert value(registry, "controller_batch_size", tier="bulk") == 64
    kv = value(registry, "kv_cache_usage_ratio")
    assert kv is not None and 0 < kv < 0.2
    await asyncio.gather(*bulk)
    await world.clock.sleep(1.0)
    counted = value(registry, "num_preemptions_total", tier="bulk", mode="pause")
    assert counted == world.core.planner.preemptions["bulk", "pause"] == 3
    assert value(registry, "generation_tokens_total", tier="bulk") == 450
    assert value(registry, "requests_finished_total", tier="bulk", reason="length") == 3


def test_changed_tiers_show_their_slos_and_counters_stay() -> None:
    metrics, registry = make_metrics()
    metrics.record_report(Report(ended=[Ended("bulk", "stop", 7, 3, True)]))
    before = make_tiers()
    without = {name: tier for name, tier in before.document(defaults=False)["tiers"].items() if name != "bulk"}
    without["realtime"]["slo"] = {"ttft_p99_ms": 750}
    tiers = parse_tiers({"default_tier": "realtime", "batch_tier": "eco", "tiers": {**without, "eco": {"priority": 1}}})
    metrics._waiting.labels("bulk").set(1)
    metrics._waiting.labels("realtime").set(2)
    metrics.reconfigure(tiers)
    assert value(registry, "num_requests_waiting", tier="bulk") is None
    assert value(registry, "num_requests_waiting", tier="realtime") == 2
    assert value(registry, "slo_target_seconds", tier="realtime", metric="ttft", quantile="0.99") == 0.75
    assert value(registry, "slo_target_seconds", tier="realtime", metric="itl", quantile="0.99") is None
    assert value(registry, "prompt_tokens_total", tier="bulk") == 7
    assert value(registry, "prompt_tokens_total", tier="eco") == 0
