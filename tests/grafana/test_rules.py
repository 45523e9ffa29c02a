"""The alert rules: checked and tested by promtool, evaluated by a real Prometheus, and each with its runbook."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.http.exposition import render
from gateway.http.metrics import ModelMetrics
from tests.grafana.exporter import Deployment, serving
from tests.grafana.prometheus_server import Prometheus, running, wait_until
from tests.test_docs import ROOT, anchors

RULES = ROOT / "docker" / "prometheus-rules.yml"
TESTS = Path(__file__).parent / "rules_test.yml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RECORDED = [rule for group in GROUPS for rule in group["rules"] if "record" in rule]
SERIES = re.compile(r"(tidegate_\w+){(.*)}")
# What one faulty deployment cannot show: its gateway answers, and one of its workers lives.
NOT_AT_ONCE = {"TidegateGatewayDown", "TidegateNoGateway", "TidegateNoWorker"}


def promtool(*arguments: str | Path) -> None:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("no `promtool` binary on the PATH: the rules are not run")
    ran = subprocess.run([binary, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_and_the_configuration_are_valid() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", ROOT / "docker" / "prometheus.yml")
    promtool("check", "config", ROOT / "docker" / "prometheus-fleet.yml")


def test_faults_fire_their_alerts_and_no_others() -> None:
    promtool("test", "rules", TESTS)


def test_each_alert_has_a_test() -> None:
    tested = set(re.findall(r'alertname="(\w+)"', TESTS.read_text(encoding="utf-8")))
    assert tested == {rule["alert"] for rule in ALERTS}


def test_the_series_of_the_tests_are_those_of_the_product() -> None:
    several = render(CollectorRegistry(), {}, "a", {"a": ModelMetrics().registry})  # a gateway of several models
    pages = (Deployment().scrape(), several)
    families = [family for page in pages for family in text_string_to_metric_families(page.decode())]
    exported = {(s.name, frozenset(s.labels)) for family in families for s in family.samples}
    tests = yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]
    used = [m for test in tests for item in test["input_series"] if (m := SERIES.fullmatch(item["series"]))]
    assert len(used) > 20
    for series in used:
        labels = frozenset(re.findall(r"(\w+)=", series[2])) - {"job", "instance"}
        assert (series[1], labels) in exported, series[0]


def test_each_alert_says_what_to_do() -> None:
    known = anchors(ROOT / "docs" / "operations.md")
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (path, anchor) == ("docs/operations.md", rule["alert"].lower())
        assert anchor in known


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no `prometheus` binary on the PATH: the rules are not run")
    folder = tmp_path_factory.mktemp("prometheus-rules")
    with serving(Deployment(faulty=True)) as port, running(binary, folder, port, at_once(folder)) as server:
        yield server


def at_once(folder: Path) -> Path:
    """The shipped rules, evaluated all the time and without waits, so that a fault fires within a second."""
    rules = [{**rule, "for": "0s"} if "alert" in rule else rule for group in GROUPS for rule in group["rules"]]
    groups = [{"name": str(number), "interval": "200ms", "rules": [rule]} for number, rule in enumerate(rules)]
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    return path


@pytest.mark.parametrize("name", sorted({rule["record"] for rule in RECORDED}))
@pytest.mark.full
def test_a_recording_rule_records(prometheus: Prometheus, name: str) -> None:
    metrics = {str(rule["labels"]["metric"]) for rule in RECORDED if rule["record"] == name}

    def recorded() -> bool:
        return {series["metric"]["metric"] for series in prometheus.query_range(name)} == metrics

    wait_until(recorded, f"series of {name} for {metrics}")


@pytest.mark.parametrize("name", [rule["alert"] for rule in ALERTS if rule["alert"] not in NOT_AT_ONCE])
@pytest.mark.full
def test_an_alert_fires_and_its_texts_are_filled_in(prometheus: Prometheus, name: str) -> None:
    def firing() -> list[dict[str, Any]]:
        return [alert for alert in prometheus.alerts() if alert["labels"]["alertname"] == name]

    for alert in wait_until(firing, f"{name} fires"):
        summary = alert["annotations"]["summary"]
        assert "<no value>" not in summary and "<error" not in summary and "{{" not in summary, summary
    assert name not in {problem["name"] for problem in prometheus.rule_problems()}
