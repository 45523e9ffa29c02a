"""A real Prometheus in a temporary directory, on a free port, scraping a gateway and its workers twice a second."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from tests.grafana.exporter import WORKERS
from tests.system.server import free_port

T = TypeVar("T")

SCRAPE_INTERVAL = "500ms"  # also the time for a scrape, on a machine that is busy with other tests


def wait_until(probe: Callable[[], T | None], what: str, deadline_s: float = 60.0) -> T:
    """The first value of `probe` that is neither None nor empty."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        if value := probe():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline_s:g} s: {what}")


class Prometheus:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query_range(self, query: str, window_s: float = 5.0) -> list[dict[str, Any]]:
        """The series of the last seconds. An error of the query fails the test."""
        now_s = time.time()
        answer = self._client.post(
            "/api/v1/query_range",
            data={"query": query, "start": str(now_s - window_s), "end": str(now_s), "step": "1s"},
        ).json()
        assert answer["status"] == "success", f"{query}: {answer['error']}"
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that fire."""
        found = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return [alert for alert in found if alert["state"] == "firing"]

    def rule_problems(self) -> list[dict[str, Any]]:
        """The rules whose last evaluation failed."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]

    def label_values(self, metric: str, label: str) -> list[str]:
        answer = self._client.get(f"/api/v1/label/{label}/values", params={"match[]": metric}).json()
        values: list[str] = answer["data"]
        return values


@contextmanager
def running(binary: str, folder: Path, target_port: int, rules: Path | None = None) -> Iterator[Prometheus]:
    config = folder / "prometheus.yml"
    targets = [f"127.0.0.1:{target_port}"]
    pages = [{"targets": targets, "labels": {"__metrics_path__": f"/{name}/metrics"}} for name in WORKERS]
    jobs = [
        {"job_name": "tidegate", "static_configs": [{"targets": targets}]},
        {"job_name": "tidegate-workers", "static_configs": pages},
    ]
    timing = {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}
    rule_files = [] if rules is None else [str(rules)]
    config.write_text(yaml.safe_dump({"global": timing, "rule_files": rule_files, "scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [binary, *arguments, f"--web.listen-address={address}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client:
                prometheus = Prometheus(client)
                wait_until(lambda: prometheus.is_ready() or process.poll() is not None, "Prometheus is ready")
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                yield prometheus
        finally:
            process.kill()
            process.wait()
