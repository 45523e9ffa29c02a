"""Scrape targets with the product's own metric families, all of them moving: each scrape is some traffic.

A faulty one has everything at once that an alert is for, except that it answers and that a worker lives.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.http.exposition import render, render_worker
from gateway.http.metrics import GatewayMetrics, ModelMetrics
from scheduler.config import load_tiers
from scheduler.control.explanation import TierOutputs
from scheduler.control.knobs import Decision
from scheduler.control.slowdown import Slowdown
from scheduler.drivers.calls.metrics import CALL_OUTCOMES, TaskMetrics
from scheduler.holdings.report import Ended, PrefixLookup, Reaction, Report
from scheduler.request_state import Sample
from scheduler.store.state import StoreState
from scheduler.tasks.task import ClaimedTask, EndedTask, Task
from scheduler.worker.metrics import SchedulerMetrics
from tests.scheduler.builders import make_core

TIERS = load_tiers(Path(__file__).parents[2] / "tiers.yaml")
WORKERS = ("worker-a", "worker-b")


class Worker:
    def __init__(self, faulty: bool = False) -> None:
        self._faulty = faulty
        self.registry = CollectorRegistry()
        self.metrics = SchedulerMetrics(self.registry, TIERS)
        self.tasks = TaskMetrics(self.registry, TIERS)  # a worker has one or the other; here one stands for both
        self._core = make_core(TIERS)
        self._rounds = 0

    def serve_some_traffic(self) -> None:
        served = [tier for tier in TIERS.tiers if not (self._faulty and tier == "bulk")]
        report = Report(used_s=dict.fromkeys(served, 0.01))
        for tier in TIERS.tiers:
            seconds = 3.0 if self._faulty else 0.03
            report.samples += [Sample(kind, tier, seconds) for kind in ("ttft", "itl", "e2e", "queue", "service")]
            reasons = ("stop", "length", "failed", "cancelled")
            report.ended += [Ended(tier, reason, 10, 20, met_slo=True) for reason in reasons]
            report.lookups.append(PrefixLookup(tier, 10, 4))
            report.reactions.append(Reaction(tier, 0.7))
        self.metrics.record_report(report)
        self.metrics.record_step(0.02, dict.fromkeys(TIERS.tiers, 4))
        knobs = ("batch_size", "max_wait_ms")
        self.metrics.record_decisions(
            Decision(tier, knob, old=8, new=new, signal="itl_p99", reason="it is above its target")
            for tier in TIERS.tiers
            for knob in knobs
            for new in (4, 16)
        )
        self._rounds += 1
        outputs = TierOutputs(8, 0.02, 0.1, ttft_p99_s=0.2, itl_p99_s=0.05, attainment=0.99, is_overloaded=self._faulty)
        slowdown = Slowdown(1.5, 1.4, 1.6, 100) if self._faulty else Slowdown(1.2, 1.15, 1.26, 100)
        status = replace(
            self._core.status(0.0),
            outputs=dict.fromkeys(TIERS.tiers, outputs),
            preemptions={(tier, mode): self._rounds for tier in TIERS.tiers for mode in ("pause", "swap", "recompute")},
            recomputed_tokens=dict.fromkeys(TIERS.tiers, 32 * self._rounds),
            restored_tokens=dict.fromkeys(TIERS.tiers, 16 * self._rounds),
            num_suspensions=self._rounds,
            wasted_s=0.02 * self._rounds,
            missing_deadlines=dict.fromkeys(TIERS.tiers, 1),
            slowdowns={("realtime", kind): slowdown for kind in ("ttft", "e2e")},
        )
        self.metrics.record_state(status, dict.fromkeys(TIERS.tiers, 7))
        self._serve_some_tasks()

    def _serve_some_tasks(self) -> None:
        self.tasks.record_waiting(dict.fromkeys(TIERS.tiers, 5), wait_s=0.06)
        for tier in TIERS.tiers:
            claimed = ClaimedTask(Task("task_1", tier, "default", 0, b"1"), fence=1, attempt=1)
            for outcome in CALL_OUTCOMES:
                self.tasks.record_call([claimed] * 60, 64, 0.2, outcome)
            for result in (b"1", None):
                self.tasks.record_ended(EndedTask(claimed, claimed.task, result), 0.4)
            self.tasks.record_retried(tier)


class Deployment:
    """A gateway and two workers, each with its own page. `scrape` is that of a gateway that shows its workers, too."""

    def __init__(self, faulty: bool = False) -> None:
        self._faulty = faulty
        self._scrapes = 0
        self.gateway = GatewayMetrics()
        self.gateway.show_from_the_start(TIERS, {"chat-ui"})
        self.model = ModelMetrics(self.gateway.registry)
        self.model.show_from_the_start(TIERS)
        self.workers = {name: Worker(faulty) for name in WORKERS}
        self._lock = threading.Lock()

    def scrape(self) -> bytes:
        with self._lock:
            self._serve_some_traffic()
            for worker in self.workers.values():
                worker.serve_some_traffic()
            pages = {name: render_worker(w.registry, name, "demo").decode() for name, w in self.workers.items()}
            return render(self.gateway.registry, pages, "demo")

    def page(self, path: str) -> bytes:
        """Return the gateway's page, or that of the worker which is named in front of `/metrics`."""
        name = path.removesuffix("/metrics").removeprefix("/")
        with self._lock:
            if not name:
                self._serve_some_traffic()
                return render(self.gateway.registry, {}, "demo")
            self.workers[name].serve_some_traffic()
            return render_worker(self.workers[name].registry, name, "demo")

    def _serve_some_traffic(self) -> None:
        for status in (200, 429, 503):
            self.gateway.observe_http("/v1/chat/completions", "POST", status, 0.2)
        for tier in TIERS.tiers:
            self.model.requests_rejected.labels(tier, "queue_full").inc()
            self.gateway.client_disconnects.labels(tier).inc()
            self.model.requests_demoted.labels(tier, "bulk").inc()
            self.model.predicted_ttft.labels(tier).set(0.3)
            for kind in ("prompt", "output"):
                self.model.queued_tokens.labels(tier, kind).set(900)
            self.gateway.usage_requests.labels("chat-ui", tier).inc(2)
            for kind in ("prompt", "cached_prompt", "completion", "cached_completion"):
                self.gateway.usage_tokens.labels("chat-ui", tier, kind).inc(30)
        self.gateway.count_rate_limited("chat-ui", "tokens")
        self.gateway.answer_cache.labels("hit").inc()
        self.gateway.count_webhook("delivered")
        self.gateway.count_closed("slow_headers")
        self._scrapes += 1
        has_lost_one = self._faulty and self._scrapes > 3
        self.model.workers_alive.set(len(self.workers) - has_lost_one)
        self.model.show_lost_workers(int(has_lost_one))
        self.model.workers_required.set(1)
        self.gateway.store_replicas_expected.set(2)
        self.gateway.show_store_state(StoreState(900 if self._faulty else 100, 1000, 1 if self._faulty else 2, 2**25))
        self.gateway.workers_wanted.labels("model").set(len(self.workers))
        self.gateway.show_store(not self._faulty, 0.001)
        self.model.show_queue_ages(dict.fromkeys(TIERS.tiers, 2000.0 if self._faulty else 0.1))
        self.gateway.count_choice("assistant", "model", "split")
        self.gateway.batches.labels("in_progress").set(1)
        self.gateway.batches_late.set(1)
        self.gateway.dead_letters.set(1)

    def families(self) -> dict[str, set[str]]:
        """Family name → the names of its samples."""
        registries = [self.gateway.registry, *(w.registry for w in self.workers.values())]
        exported: dict[str, set[str]] = {}
        for registry in registries:
            for family in registry.collect():
                names = {s.name for s in family.samples if not s.name.endswith("_created")}
                exported.setdefault(family.name, set()).update(names)
        return exported


@contextmanager
def serving(deployment: Deployment) -> Iterator[int]:
    """The port on which `deployment` is scraped."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = deployment.page(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test's output is not an access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
