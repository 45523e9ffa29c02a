"""The dashboard against the product's metrics: every query answered by a real Prometheus, every family shown."""

import math
import re
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grafana.dashboard import GRAFANA, Query, load_dashboard, panels, queries
from tests.grafana.exporter import TIERS, WORKERS, Deployment, serving
from tests.grafana.prometheus_server import Prometheus, running, wait_until

DASHBOARD = load_dashboard()
QUERIES = queries(DASHBOARD)
# Families that are exported, but on purpose on no panel: the first is above 0 only while versions are mixed, the
# next two are for those who write routing rules and splits, and the last one is for the alerts.
NOT_SHOWN = {
    "tidegate_workers_unreadable",
    "tidegate_requests_routed",
    "tidegate_model_choices",
    "tidegate_workers_required",
    "tidegate_spec_decode_num_draft_tokens",
    "tidegate_spec_decode_num_accepted_tokens",
}
VARIABLES = {"__rate_interval": "2s", "tier": "realtime", "worker": "|".join(WORKERS), "datasource": "prometheus"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no `prometheus` binary on the PATH: the dashboard's queries are not run")
    with serving(Deployment()) as port, running(binary, tmp_path_factory.mktemp("prometheus"), port) as server:
        yield server


def has_a_number(series: dict[str, Any]) -> bool:
    return any(math.isfinite(float(value)) for _, value in series["values"])


@pytest.mark.parametrize("query", QUERIES, ids=str)
@pytest.mark.full
def test_the_query_is_answered_with_numbers_and_its_labels(prometheus: Prometheus, query: Query) -> None:
    expression = query.filled_in(VARIABLES)
    assert "$" not in expression

    def numbers() -> list[dict[str, Any]]:
        return [series for series in prometheus.query_range(expression) if has_a_number(series)]

    for series in wait_until(numbers, f"data for {query}: {expression}"):
        assert query.legend_labels <= set(series["metric"]), f"{query}: {series['metric']}"


@pytest.mark.parametrize(("name", "values"), [("tier", sorted(TIERS.tiers)), ("worker", sorted(WORKERS))])
@pytest.mark.full
def test_a_variable_offers_every_value(prometheus: Prometheus, name: str, values: list[str]) -> None:
    definition = next(v["definition"] for v in DASHBOARD["templating"]["list"] if v["name"] == name)
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition)
    assert asked is not None
    assert wait_until(lambda: prometheus.label_values(*asked.groups()), f"values of {name}") == values


def test_a_query_names_only_metrics_that_are_exported() -> None:
    deployment = Deployment()
    deployment.scrape()
    exported = set().union(*deployment.families().values())
    unknown = {metric: str(query) for query in QUERIES for metric in query.metrics - exported}
    assert not unknown


def test_every_exported_family_is_shown_or_listed_as_not_shown() -> None:
    deployment = Deployment()
    deployment.scrape()
    used = set().union(*(query.metrics for query in QUERIES))
    families = deployment.families()
    unseen = {family for family, samples in families.items() if not samples & used}
    assert unseen == NOT_SHOWN
    assert len(families) > 20


def test_panels_say_what_they_show() -> None:
    for panel in panels(DASHBOARD):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_panels_do_not_overlap_and_ids_are_their_own() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    boxes = [panel["gridPos"] for panel in everything]
    for a, b in combinations(boxes, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert all(box["x"] + box["w"] <= 24 for box in boxes)


def test_each_tier_has_a_row_of_its_own() -> None:
    repeated = [panel for panel in DASHBOARD["panels"] if panel.get("repeat")]
    assert [row["repeat"] for row in repeated] == ["tier"]


def test_overrides_match_a_series_of_their_panel() -> None:
    """A renamed legend would silently lose its colour, its dashes or its axis."""
    for panel in panels(DASHBOARD):
        legends = {target["legendFormat"] for target in panel["targets"]}
        if any("{{" in legend for legend in legends):
            continue
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in legends, panel["title"]


def test_provisioning_points_at_what_is_shipped() -> None:
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/tidegate.yaml").read_text())["providers"][0]
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    compose = yaml.safe_load((Path(GRAFANA).parent / "docker-compose.yml").read_text())
    mounts = [str(volume).split(":") for volume in compose["services"]["grafana"]["volumes"]]
    mounted = {inside: outside for outside, inside, *_ in mounts}
    assert mounted[provider["options"]["path"]] == "./grafana/dashboards"
    assert mounted["/etc/grafana/provisioning"] == "./grafana/provisioning"
    assert source["url"] == "${PROMETHEUS_URL}"
    assert compose["services"]["grafana"]["environment"]["PROMETHEUS_URL"].startswith("http://prometheus:")
