"""What a real Helm makes of the chart. `make test-helm` has one; tests without it say that they were skipped."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_chart import CHART, VALUES
from tidegate.settings.base import CommonSettings
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.worker import WorkerSettings

SETTINGS: dict[str, type[CommonSettings]] = {"gateway": GatewaySettings, "worker": WorkerSettings}

Resource = dict[str, Any]

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no `helm` on the PATH (make test-helm)")
each_example = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)


@cache
def rendered(path: Path, *changes: str) -> list[Resource]:
    sets = [part for change in changes for part in ("--set-json", change)]
    ran = helm("template", "rel", CHART, "--namespace", "llm", "--values", path, *sets)
    assert ran.returncode == 0, ran.stderr
    return [resource for resource in yaml.safe_load_all(ran.stdout) if resource]


def named(path: str) -> Path:
    return CHART / "ci" / f"{path}-values.yaml"


def of_kind(resources: list[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


def pods(resources: list[Resource]) -> Iterator[tuple[Resource, Resource]]:
    """Yield the workloads with the templates of their pods."""
    for workload in of_kind(resources, "Deployment", "StatefulSet"):
        yield workload, workload["spec"]["template"]


def parts(resources: list[Resource]) -> Iterator[tuple[str, Resource, Resource]]:
    """Yield (command, pod, container) of each part of Tidegate."""
    for _, template in pods(resources):
        (container,) = template["spec"]["containers"]
        if container["name"] in SETTINGS:
            yield container["args"][0], template["spec"], container


def flags(container: Resource) -> dict[str, Any]:
    """Return a container's flags as settings."""
    pairs = [argument.removeprefix("--").partition("=") for argument in container["args"][1:]]
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}


def matches(selector: Resource, labels: Resource) -> bool:
    return selector.items() <= labels.items()
