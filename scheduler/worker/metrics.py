"""The worker's Prometheus metrics. They have vLLM's names with the prefix `tidegate_`, and a `tier` label.

This is the only module of the scheduler that writes metrics. It translates what the core reports and makes no
decisions. The registry is injected, so that two workers in one process (tests, the simulator) do not share metrics.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.config import TierSet
from scheduler.control.explanation import TierOutputs
from scheduler.control.knobs import Decision
from scheduler.holdings.report import Report
from scheduler.holdings.status import CoreStatus

SECONDS = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0, 3600.0,
)  # fmt: skip
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
STEPS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


def _series(family: Any, *labels: str) -> Any:
    return family.labels(*labels)


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry, tiers: TierSet) -> None:
        self._tiers = tiers
        # The series of counters and histograms, which are never removed. To look one up anew takes as long as to add.
        self._series = cache(_series)
        tier = ["tier"]

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: list[str]) -> Histogram:
            return Histogram(f"tidegate_{name}", text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tidegate_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tidegate_{name}", text, labels, registry=registry)

        self._latency = {
            "ttft": histogram("time_to_first_token_seconds", "Seconds from arrival to first token.", SECONDS, tier),
            "itl": histogram("inter_token_latency_seconds", "Seconds between two tokens.", GAP_SECONDS, tier),
            "e2e": histogram("e2e_request_latency_seconds", "Seconds from arrival to last token.", SECONDS, tier),
            "queue": histogram("request_queue_time_seconds", "Seconds from arrival to first step.", SECONDS, tier),
            "service": histogram(
                "first_token_service_seconds", "Seconds from first step to first token.", SECONDS, tier
            ),
        }
        self._reaction = histogram(
            "reaction_steps", "Time from arrival to first step, in lengths of the step that was running.", STEPS, tier
        )
        self._batch = histogram("step_batch_size", "Sequences of the tier in one step.", SEQUENCES, tier)
        self._step = histogram("step_seconds", "Seconds that the engine took for a step.", GAP_SECONDS, [])
        self._waiting = gauge("num_requests_waiting", "Requests in the tier's queue.", "tier")
        self._running = gauge("num_requests_running", "Sequences that may run in the next step.", "tier")
        self._paused = gauge("num_requests_paused", "Sequences that sit steps out with their KV on the device.", "tier")
        self._swapped = gauge("num_requests_swapped", "Sequences whose KV is in host memory.", "tier")
        self._kv = gauge("kv_cache_usage_ratio", "Share of KV blocks in use.")
        self._target = gauge("slo_target_seconds", "The tier's SLO.", "tier", "metric", "quantile")
        self._observed = gauge(
            "slo_observed_seconds",
            "The latency quantile that the controller observes.",
            "tier",
            "metric",
            "quantile",
        )
        self._attainment = gauge("slo_attainment_ratio", "Share of recently ended requests that met all SLOs.", "tier")
        self._missed = counter("slo_misses", "First tokens and token gaps over the SLO.", "tier", "metric")
        self._targets_s: dict[tuple[str, str], float] = {}  # SLOs by metric and tier
        self._max_wait = gauge("controller_max_wait_seconds", "The controller's max-wait.", "tier")
        self._batch_size = gauge("controller_batch_size", "The controller's batch size.", "tier")
        self._batch_tokens = gauge(
            "controller_batch_tokens", "The controller's limit on tokens of the tier per step.", "tier"
        )
        self._margin = gauge(
            "controller_margin_ratio", "Share of an SLO that the controller keeps as a margin.", "tier"
        )
        self._overloaded = gauge(
            "controller_overloaded",
            "1 while first tokens would come much too late: the tier is served in order.",
            "tier",
        )
        self._slowdown = gauge(
            "bulk_slowdown_ratio",
            "How many times as long it takes because of bulk, measured by slots without bulk, with its 95 % interval.",
            "tier",
            "metric",
            "bound",
        )
        self._max_slowdown = gauge("max_slowdown_ratio", "The tier's max_slowdown.", "tier")
        self._missing = gauge(
            "missing_deadlines", "Bulk requests on this worker that cannot end by their deadlines any more.", "tier"
        )
        self._arriving = gauge("arrivals_per_second", "Smoothed arrival rate, as this worker sees it.", "tier")
        self._reserve = gauge("kv_reserve_blocks", "KV blocks that bulk leaves free for interactive sequences.")
        self._error = gauge("step_time_error_ratio", "Mean |predicted / measured - 1| of recent steps.")
        self._suspensions = counter(
            "step_suspensions", "Times that a step of bulk was suspended for interactive requests."
        )
        self._wasted = counter("dropped_step_seconds", "Engine seconds of suspended steps that were dropped.")
        self._used = counter("engine_seconds", "Engine seconds that were of use to the tier.", "tier")
        self._recomputed = counter(
            "recomputed_tokens", "Tokens whose KV was freed by preemption, to be computed again.", "tier"
        )
        self._restored = counter(
            "restored_tokens", "Output tokens that claimed requests had from earlier workers' checkpoints.", "tier"
        )
        self._preempted = counter("num_preemptions", "Sequences preempted.", "tier", "mode")
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests.", "tier")
        self._generated = counter("generation_tokens", "Tokens generated.", "tier")
        self._queried = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "tier")
        self._hit = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "tier")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens of drafts that were computed.", "tier")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Tokens of drafts that were right.", "tier")
        self._finished = counter("requests_finished", "Ended requests.", "tier", "reason")
        self._decided = counter(
            "controller_decisions", "Moves of a controller knob.", "tier", "knob", "direction", "reason"
        )
        self._counted: dict[tuple[str, ...], float] = {}
        self._show_from_the_start()

    def _show_from_the_start(self) -> None:
        """Create every series before its first event, so that rates start at zero."""
        self._targets_s.clear()
        for tier in self._tiers.by_priority:
            counters = (self._prompt, self._generated, self._queried, self._hit, self._recomputed, self._restored)
            drafts = (self._drafted, self._accepted)
            for family in (*self._latency.values(), self._reaction, self._batch, self._used, *counters, *drafts):
                family.labels(tier.name)
            for mode in ("pause", "swap", "recompute"):
                self._preempted.labels(tier.name, mode)
            for reason in ("stop", "length", "failed", "cancelled"):
                self._finished.labels(tier.name, reason)
            _set_or_remove(self._max_slowdown, (tier.name,), tier.max_slowdown)
            targets = {"ttft": tier.slo.ttft_p99_ms, "itl": tier.slo.itl_p99_ms}
            for metric, target_ms in targets.items():
                target_s = None if target_ms is None else target_ms / 1000
                _set_or_remove(self._target, (tier.name, metric, "0.99"), target_s)
                if target_s is not None:
                    self._targets_s[metric, tier.name] = target_s
                    self._missed.labels(tier.name, metric)

    def reconfigure(self, tiers: TierSet) -> None:
        """Show the SLOs of changed tiers. The counters of a removed tier stay; its gauges are removed."""
        for name in set(self._tiers.tiers) - set(tiers.tiers):
            held = (self._waiting, self._running, self._paused, self._swapped)
            knobs = (self._max_wait, self._batch_size, self._batch_tokens, self._margin)
            for gauge in (
                *held,
                *knobs,
                self._overloaded,
                self._missing,
                self._arriving,
                self._attainment,
                self._max_slowdown,
            ):
                gauge.remove(name)
            for metric, bound in product(("ttft", "e2e"), ("value", "low", "high")):
                self._slowdown.remove(name, metric, bound)
            for metric in ("ttft", "itl"):
                self._target.remove(name, metric, "0.99")
                self._observed.remove(name, metric, "0.99")
        self._tiers = tiers
        self._show_from_the_start()

    def record_step(self, elapsed_s: float, ran: Mapping[str, int]) -> None:
        """Record one executed step. `ran` holds the number of its sequences, by tier."""
        self._step.observe(elapsed_s)
        for tier, sequences in ran.items():
            self._series(self._batch, tier).observe(sequences)

    def record_report(self, report: Report) -> None:
        for sample in report.samples:
            self._series(self._latency[sample.kind], sample.tier).observe(sample.seconds)
            if sample.seconds > self._targets_s.get((sample.kind, sample.tier), math.inf):
                self._series(self._missed, sample.tier, sample.kind).inc()
        for tier, count in report.tokens.items():
            self._series(self._generated, tier).inc(count)
        for draft in report.drafts:
            self._series(self._drafted, draft.state.tier.name).inc(draft.num_drafted)
            self._series(self._accepted, draft.state.tier.name).inc(draft.num_accepted)
        for reaction in report.reactions:
            self._series(self._reaction, reaction.tier).observe(reaction.steps)
        for tier, seconds in report.used_s.items():
            self._series(self._used, tier).inc(seconds)
        for end in report.ended:
            self._series(self._finished, end.tier, end.reason).inc()
            self._series(self._prompt, end.tier).inc(end.prompt_tokens)
        for lookup in report.lookups:
            self._series(self._queried, lookup.tier).inc(lookup.queried_tokens)
            self._series(self._hit, lookup.tier).inc(lookup.hit_tokens)

    def record_cancelled(self, tier: str) -> None:
        self._finished.labels(tier, "cancelled").inc()

    def record_decisions(self, decisions: Iterable[Decision]) -> None:
        for d in decisions:
            self._decided.labels(d.tier, d.knob, d.direction, d.signal).inc()

    def record_state(self, status: CoreStatus, queued: Mapping[str, int]) -> None:
        """Set the gauges and the counters from the state of the core.

        `queued` holds the number of requests in the queue, by tier.
        """
        self._kv.set(status.kv_usage)
        for tier in self._tiers.tiers:
            held = status.held[tier]
            self._waiting.labels(tier).set(queued.get(tier, 0))
            self._running.labels(tier).set(held.running)
            self._paused.labels(tier).set(held.paused)
            self._swapped.labels(tier).set(held.swapped)
            self._record_outputs(tier, status.outputs[tier])
            self._missing.labels(tier).set(status.missing_deadlines.get(tier, 0))
        for key, slowdown in status.slowdowns.items():
            for bound in ("value", "low", "high"):
                value = None if slowdown is None else getattr(slowdown, bound)
                _set_or_remove(self._slowdown, (*key, bound), value)
        for key, count in status.preemptions.items():
            self._count_up(self._preempted.labels(*key), ("preempted", *key), count)
        for tier, count in status.recomputed_tokens.items():
            self._count_up(self._recomputed.labels(tier), ("recomputed", tier), count)
        for tier, count in status.restored_tokens.items():
            self._count_up(self._restored.labels(tier), ("restored", tier), count)
        self._count_up(self._suspensions, ("suspended",), status.num_suspensions)
        self._count_up(self._wasted, ("wasted",), status.wasted_s)
        self._error.set(status.step_time_error)
        self._reserve.set(status.kv_reserve_blocks)

    def _count_up(self, counter: Counter, key: tuple[str, ...], total: float) -> None:
        """Raise a counter to `total`, which is counted elsewhere."""
        counter.inc(total - self._counted.get(key, 0))
        self._counted[key] = total

    def _record_outputs(self, tier: str, output: TierOutputs) -> None:
        self._max_wait.labels(tier).set(output.max_wait_s)
        self._batch_size.labels(tier).set(output.batch_size)
        self._batch_tokens.labels(tier).set(output.batch_tokens)
        self._margin.labels(tier).set(output.margin)
        self._overloaded.labels(tier).set(output.is_overloaded)
        self._arriving.labels(tier).set(output.arrivals_per_s)
        for metric, seconds in (("ttft", output.ttft_p99_s), ("itl", output.itl_p99_s)):
            _set_or_remove(self._observed, (tier, metric, "0.99"), seconds)
        _set_or_remove(self._attainment, (tier,), output.attainment)


def _set_or_remove(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
    """Set a gauge. If it has no value, remove its series, because an old value must not look current."""
    if value is None:
        gauge.remove(*labels)
    else:
        gauge.labels(*labels).set(value)
