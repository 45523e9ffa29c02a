"""The shipped dashboard as data: its panels, their queries, and the metric names in them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[2] / "grafana"
METRIC = re.compile(r"tidegate_[a-z0-9_]+")
LEGEND_LABEL = re.compile(r"{{\s*(\w+)\s*}}")


@dataclass(frozen=True, slots=True)
class Query:
    panel: str
    ref: str
    expression: str
    legend: str

    @property
    def metrics(self) -> set[str]:
        return set(METRIC.findall(self.expression))

    @property
    def legend_labels(self) -> set[str]:
        return set(LEGEND_LABEL.findall(self.legend))

    def filled_in(self, variables: dict[str, str]) -> str:
        """The query as Grafana sends it."""
        expression = self.expression
        for name, value in variables.items():
            expression = expression.replace(f"${name}", value)
        return expression

    def __str__(self) -> str:
        return f"{self.panel}/{self.ref}"


def load_dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "tidegate.json").read_text(encoding="utf-8"))
    return loaded


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All but the rows."""
    for panel in dashboard["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def queries(dashboard: dict[str, Any]) -> list[Query]:
    return [
        Query(panel["title"], target["refId"], target["expr"], target["legendFormat"])
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
