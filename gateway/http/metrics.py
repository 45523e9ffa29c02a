"""The gateway's metric families, in their own Prometheus registry."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.queue.base import Backlog

# Bucket bounds in seconds. The first buckets fit refusals, the last ones the longest bulk answers.
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.http_requests = Counter(
            "tidegate_http_requests_total",
            "HTTP requests answered. Status 499 means that the client hung up before the answer was complete.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.http_seconds = Histogram(
            "tidegate_http_request_seconds",
            "Seconds from a request's arrival to the last byte of its answer.",
            ["route"],
            buckets=HTTP_SECONDS,
            registry=self.registry,
        )
        self.requests_rejected = Counter(
            "tidegate_requests_rejected_total",
            "Requests refused at admission, before anything was queued.",
            ["tier", "reason"],
            registry=self.registry,
        )
        self.requests_demoted = Counter(
            "tidegate_requests_demoted_total",
            "Requests served in a lower tier because their own tier could not have met its SLO.",
            ["tier", "to"],
            registry=self.registry,
        )
        self.predicted_ttft = Gauge(
            "tidegate_predicted_ttft_seconds",
            "Predicted TTFT in seconds of a short request that arrives now, for tiers that have a prediction.",
            ["tier"],
            registry=self.registry,
        )
        self.queued_tokens = Gauge(
            "tidegate_queued_tokens",
            "Tokens of waiting requests. Kind prompt counts prompt tokens, kind output the maximum of output tokens.",
            ["tier", "kind"],
            registry=self.registry,
        )
        self.client_disconnects = Counter(
            "tidegate_client_disconnects_total",
            "Clients that hung up before their answer was complete.",
            ["tier"],
            registry=self.registry,
        )
        self.workers_alive = Gauge("tidegate_workers_alive", "Workers with a fresh heartbeat.", registry=self.registry)
        self.batches = Gauge("tidegate_batches", "Batches by status.", ["status"], registry=self.registry)
        self.usage_requests = Counter(
            "tidegate_usage_requests_total", "Requests of an API key.", ["key", "tier"], registry=self.registry
        )
        self.usage_tokens = Counter(
            "tidegate_usage_tokens_total",
            "Tokens of an API key. The kinds cached_prompt and cached_completion are parts of prompt and completion.",
            ["key", "tier", "kind"],
            registry=self.registry,
        )
        self.rate_limited = Counter(
            "tidegate_rate_limited_total",
            "Requests refused by a limit of their API key: of requests (by minute, or open at once) or of tokens.",
            ["key", "limit"],
            registry=self.registry,
        )
        self.answer_cache = Counter(
            "tidegate_answer_cache_total",
            "Requests that asked for the answer cache: hit, miss, or bypass where the answer cannot be cached.",
            ["result"],
            registry=self.registry,
        )
        # The counters by their labels, because looking them up would take longer than counting.
        self._usage: dict[tuple[str, str, str], Counter] = {}

    def observe_http(self, route: str, method: str, status: int, seconds: float) -> None:
        self.http_requests.labels(route, method, str(status)).inc()
        self.http_seconds.labels(route).observe(seconds)

    def count_rejected(self, tier: str, reason: str) -> None:
        self.requests_rejected.labels(tier, reason).inc()

    def count_demoted(self, tier: str, to: str) -> None:
        self.requests_demoted.labels(tier, to).inc()

    def show_backlogs(self, backlogs: Mapping[str, Backlog], predicted_ttfts_s: Mapping[str, float]) -> None:
        """Set the gauges of waiting tokens and predicted TTFTs. Tiers without a value are removed from the gauges."""
        self.queued_tokens.clear()
        self.predicted_ttft.clear()
        for tier, backlog in backlogs.items():
            self.queued_tokens.labels(tier, "prompt").set(backlog.prompt_tokens)
            self.queued_tokens.labels(tier, "output").set(backlog.output_tokens)
        for tier, seconds in predicted_ttfts_s.items():
            self.predicted_ttft.labels(tier).set(seconds)

    def count_disconnect(self, tier: str) -> None:
        self.client_disconnects.labels(tier).inc()

    def count_requests(self, key: str, tier: str, amount: int) -> None:
        counter = self._usage.get((key, tier, ""))
        if counter is None:
            counter = self._usage[key, tier, ""] = self.usage_requests.labels(key, tier)
        counter.inc(amount)

    def count_tokens(self, key: str, tier: str, kind: str, amount: int) -> None:
        counter = self._usage.get((key, tier, kind))
        if counter is None:
            counter = self._usage[key, tier, kind] = self.usage_tokens.labels(key, tier, kind)
        counter.inc(amount)

    def count_rate_limited(self, key: str, limit: str) -> None:
        self.rate_limited.labels(key, limit).inc()

    def count_cache_lookup(self, result: str) -> None:
        self.answer_cache.labels(result).inc()
