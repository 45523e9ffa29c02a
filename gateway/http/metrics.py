"""The gateway's metric families, and those of each model, in their own Prometheus registries."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.http.server.connections import Closed
from scheduler.client.rejection import RejectReason
from scheduler.config import TierSet
from scheduler.queue.base import Backlog
from scheduler.store.state import StoreState

KEY_LIMITS = ("requests", "tokens", "budget")
CACHE_RESULTS = ("hit", "miss", "bypass")
WEBHOOK_RESULTS = ("delivered", "retried", "gave_up")
TOKEN_KINDS = ("prompt", "cached_prompt", "completion", "cached_completion")
COMPLETION_ROUTES = ("/v1/chat/completions", "/v1/completions")
COMPLETION_STATUSES = ("200", "400", "429", "499", "500", "503")
# Bucket bounds in seconds. The first buckets fit refusals, the last ones the longest bulk answers.
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.http_requests = counter(
            "tidegate_http_requests_total",
            "HTTP requests answered. Status 499 means that the client hung up before the answer was complete.",
            ["route", "method", "status"],
        )
        self.http_seconds = Histogram(
            "tidegate_http_request_seconds",
            "Seconds from a request's arrival to the last byte of its answer.",
            ["route"],
            buckets=HTTP_SECONDS,
            registry=self.registry,
        )
        self.requests_routed = counter(
            "tidegate_requests_routed_total", "Requests whose tier a rule of `routing` in tiers.yaml chose.", ["rule"]
        )
        self.store_up = gauge("tidegate_store_up", "1 while the store answers and takes writes, else 0.")
        self.store_seconds = gauge(
            "tidegate_store_latency_seconds", "Seconds that the store took to answer the newest reading of the queues."
        )
        self.store_memory = gauge("tidegate_store_memory_bytes", "Memory that the store uses.")
        self.store_memory_limit = gauge(
            "tidegate_store_memory_limit_bytes",
            "Memory that the store may use: its maxmemory, or all memory of its machine without one.",
        )
        self.store_replicas = gauge("tidegate_store_replicas", "Replicas that follow the store.")
        self.store_replicas_expected = gauge(
            "tidegate_store_replicas_expected", "Replicas that must have what is acknowledged: --store-replicas."
        )
        self.store_replica_lag = gauge(
            "tidegate_store_replica_lag_bytes",
            "Of the store's newest writes, what the slowest of its replicas does not have yet; 0 without replicas.",
        )
        self.client_disconnects = counter(
            "tidegate_client_disconnects_total", "Clients that hung up before their answer was complete.", ["tier"]
        )
        self.connections_closed = counter(
            "tidegate_connections_closed_total",
            "Connections that the server refused or closed because they were too many or too slow.",
            ["reason"],
        )
        self.workers_wanted = gauge(
            "tidegate_workers_wanted", "Workers that the load needs, for autoscalers: see GET /admin/scale.", ["model"]
        )
        self.batches = gauge("tidegate_batches", "Batches by status.", ["status"])
        self.batches_late = gauge(
            "tidegate_batches_late",
            "Unfinished batches of all gateways that are expected to end after their window, except best effort.",
        )
        self.dead_letters = gauge("tidegate_dead_letters", "Requests that were given up because their workers died.")
        self.usage_requests = counter("tidegate_usage_requests_total", "Requests of an API key.", ["key", "tier"])
        self.usage_tokens = counter(
            "tidegate_usage_tokens_total",
            "Tokens of an API key. The kinds cached_prompt and cached_completion are parts of prompt and completion.",
            ["key", "tier", "kind"],
        )
        self.rate_limited = counter(
            "tidegate_rate_limited_total",
            "Requests refused by a limit of their API key or its project: of requests (by minute, or open at once), of "
            "tokens, or by a budget.",
            ["key", "limit"],
        )
        self.answer_cache = counter(
            "tidegate_answer_cache_total",
            "Requests that asked for the answer cache: hit, miss, or bypass where the answer cannot be cached.",
            ["result"],
        )
        self.model_choices = counter(
            "tidegate_model_choices_total",
            "Requests that another model answers than the one they named: a split's, or a fallback.",
            ["asked", "model", "why"],
        )
        self.webhooks = counter(
            "tidegate_webhook_attempts_total",
            "Attempts to deliver a webhook: delivered, retried later, or gave_up after the last one.",
            ["result"],
        )

    def show_from_the_start(self, tiers: TierSet, limited_keys: Iterable[str], used_keys: Collection[str] = ()) -> None:
        """Create the series of all known labels before their first event, so that rates start at zero.

        `limited_keys` are the names of API keys with limits, `used_keys` those whose usage is shown before they are
        used: for all keys there would be too many.
        """
        for tier in tiers.tiers.values():
            self.client_disconnects.labels(tier.name)
            for key in used_keys:
                self.usage_requests.labels(key, tier.name)
                for kind in TOKEN_KINDS:
                    self.usage_tokens.labels(key, tier.name, kind)
        for closed in Closed:
            self.connections_closed.labels(closed.value)
        for key in limited_keys:
            for limit in KEY_LIMITS:
                self.rate_limited.labels(key, limit)
        for result in WEBHOOK_RESULTS:
            self.webhooks.labels(result)
        for result in CACHE_RESULTS:
            self.answer_cache.labels(result)
        for route in COMPLETION_ROUTES:
            self.http_seconds.labels(route)
            for status in COMPLETION_STATUSES:
                self.http_requests.labels(route, "POST", status)

    def observe_http(self, route: str, method: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, method, str(status)).inc()
        self.http_seconds.labels(route).observe(seconds)

    def show_store(self, is_up: bool, latency_s: float) -> None:
        self.store_up.set(is_up)
        self.store_seconds.set(latency_s)

    def show_store_state(self, state: StoreState) -> None:
        self.store_memory.set(state.memory_bytes)
        self.store_memory_limit.set(state.memory_limit_bytes)
        self.store_replicas.set(state.replicas)
        self.store_replica_lag.set(state.replica_lag_bytes or 0)

    def count_choice(self, asked: str, model: str, why: str) -> None:
        self.model_choices.labels(asked, model, why).inc()

    def count_rate_limited(self, key: str, limit: str) -> None:
        self.rate_limited.labels(key, limit).inc()

    def count_webhook(self, result: str) -> None:
        self.webhooks.labels(result).inc()

    def count_closed(self, reason: str) -> None:
        self.connections_closed.labels(reason).inc()


class ModelMetrics:
    """The metric families of one model's queues and workers, by tier.

    `registry` is None where there are several models: then each has one of its own, and the samples have a label more.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.requests_rejected = counter(
            "tidegate_requests_rejected_total",
            "Requests refused at admission, before anything was queued.",
            ["tier", "reason"],
        )
        self.requests_demoted = counter(
            "tidegate_requests_demoted_total",
            "Requests served in a lower tier because their own tier could not have met its SLO.",
            ["tier", "to"],
        )
        self.predicted_ttft = gauge(
            "tidegate_predicted_ttft_seconds",
            "Predicted TTFT in seconds of a short request that arrives now, for tiers that have a prediction.",
            ["tier"],
        )
        self.queued_tokens = gauge(
            "tidegate_queued_tokens",
            "Tokens of waiting requests. Kind prompt counts prompt tokens, kind output the maximum of output tokens.",
            ["tier", "kind"],
        )
        self.queue_age = gauge(
            "tidegate_queue_age_seconds",
            "Seconds that the request at the head of the tier's queue has waited; 0 if none waits.",
            ["tier"],
        )
        self.workers_alive = gauge("tidegate_workers_alive", "Workers with a fresh heartbeat.")
        self.workers_lost = counter(
            "tidegate_workers_lost_total",
            "Workers that stopped to send heartbeats without being stopped in order.",
        )
        self.workers_required = gauge(
            "tidegate_workers_required",
            "1 if requests need a worker now: always, or with --scale-from-zero while there is work; else 0.",
        )
        self._num_lost: int | None = None  # workers of the store that were lost at the last reading
        self.workers_unreadable = gauge(
            "tidegate_workers_unreadable",
            "Workers whose heartbeats this gateway cannot read, as those of another version.",
        )

    def show_from_the_start(self, tiers: TierSet) -> None:
        """Create the series of all tiers before their first event, so that rates start at zero."""
        for tier in tiers.tiers.values():
            for reason in RejectReason:
                self.requests_rejected.labels(tier.name, reason.value)
            if tier.admission.demote_to is not None:
                self.requests_demoted.labels(tier.name, tier.admission.demote_to)

    def show_backlogs(self, backlogs: Mapping[str, Backlog], predicted_ttfts_s: Mapping[str, float]) -> None:
        """Set the gauges of waiting tokens and predicted TTFTs. Tiers without a value are removed from the gauges."""
        self.queued_tokens.clear()
        self.predicted_ttft.clear()
        for tier, backlog in backlogs.items():
            self.queued_tokens.labels(tier, "prompt").set(backlog.prompt_tokens)
            self.queued_tokens.labels(tier, "output").set(backlog.output_tokens)
        for tier, seconds in predicted_ttfts_s.items():
            self.predicted_ttft.labels(tier).set(seconds)

    def show_queue_ages(self, queue_ages_s: Mapping[str, float]) -> None:
        """Set the gauge of how long heads of queues have waited. Tiers without an age are removed from it."""
        self.queue_age.clear()
        for tier, seconds in queue_ages_s.items():
            self.queue_age.labels(tier).set(seconds)

    def show_lost_workers(self, num_lost: int) -> None:
        """Count the workers that were lost since the last reading. The store's number is older than this gateway."""
        if self._num_lost is not None:
            self.workers_lost.inc(max(0, num_lost - self._num_lost))
        self._num_lost = num_lost
