"""The Helm chart without Helm: copies, values with their schema, and the flags and paths in its templates."""

import json
import re
import tomllib
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scheduler.clock import SystemClock
from tests.gateway.stand import running_stand
from tests.test_docs import fences
from tidegate.settings.base import CommonSettings
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.worker import WorkerSettings
from tidegate.worker.health import WorkerHealth

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "tidegate"
PAGE = ROOT / "docs" / "kubernetes.md"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
COPIES = {"prometheus-rules.yml": "docker/prometheus-rules.yml", "tidegate.json": "grafana/dashboards/tidegate.json"}
SETTINGS: dict[str, type[CommonSettings]] = {"gateway": GatewaySettings, "workers": WorkerSettings}


def template(name: str) -> str:
    return (CHART / "templates" / f"{name}.yaml").read_text(encoding="utf-8")


def merged(defaults: Any, values: Any) -> Any:
    """Return values as Helm merges them into the chart's own."""
    if not isinstance(defaults, dict) or not isinstance(values, dict):
        return values
    return {**defaults, **{key: merged(defaults.get(key), value) for key, value in values.items()}}


@pytest.mark.parametrize("name", COPIES)
def test_files_of_the_chart_are_copies(name: str) -> None:
    original = ROOT / COPIES[name]
    same = (CHART / "files" / name).read_bytes() == original.read_bytes()
    assert same, f"run: cp {COPIES[name]} {CHART.relative_to(ROOT)}/files/{name}"
    assert {path.name for path in (CHART / "files").iterdir()} == set(COPIES)


def test_the_chart_installs_the_version_of_this_repository() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_chart_and_the_compose_file_start_the_same_store() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    image = DEFAULTS["store"]["valkey"]["image"]
    assert f"{image['repository']}:{image['tag']}" == compose["services"]["valkey"]["image"]


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_the_schema_takes_the_example(path: Path) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(merged(DEFAULTS, yaml.safe_load(path.read_text(encoding="utf-8"))))


def test_every_value_is_in_the_schema_and_every_property_has_a_default() -> None:
    def names(schema: dict[str, Any], values: Any, where: str) -> None:
        schema = SCHEMA["definitions"]["model"] if schema.get("$ref", "").endswith("/model") else schema
        if schema.get("additionalProperties") is not False or "anyOf" in schema:
            return
        assert set(schema["properties"]) == set(values), where
        for name, value in values.items():
            names(schema["properties"][name], value, f"{where}.{name}")

    own = {**SCHEMA, "properties": {k: v for k, v in SCHEMA["properties"].items() if k != "global"}}  # Helm's own
    names(own, DEFAULTS, "values")


WRONG = [
    ({"gatway": {}}, "gatway"),
    ({"models": {"qwen": {"pth": "x"}}}, "pth"),
    ({"models": {"qwen": {"kind": "chats"}}}, "kind"),
    ({"models": {"qwen": {"engine": "tgi"}}}, "engine"),
    ({"models": {"qwen": {"device": "tpu"}}}, "device"),
    ({"models": {"qwen": {"upstream": "vllm:8000"}}}, "upstream"),
    ({"models": {"qwen": {"autoscaling": {"maxReplicas": 0}}}}, "maxReplicas"),
    ({"models": {"qwen": {"shmSize": "8 gigabytes"}}}, "shmSize"),
    ({"models": {"two words": {"path": "x"}}}, "two words"),
    ({"models": {}}, "models"),
    ({"splits": {"assistant": {}}}, "assistant"),
    ({"drainSeconds": -1}, "drainSeconds"),
    ({"logLevel": "trace"}, "logLevel"),
    ({"gateway": {"replicas": 0}}, "replicas"),
    ({"gateway": {"service": {"port": 70000}}}, "port"),
    ({"gateway": {"service": {"port": 0}}}, "port"),
    ({"auth": {"apiKeys": {"secret": "x"}}}, "apiKeys"),
    ({"store": {"url": "http://store"}}, "url"),
    ({"store": {"memoryMb": 1}}, "memoryMb"),
    ({"files": {"accessMode": "ReadOnlyMany"}}, "accessMode"),
    ({"ingress": {"enabled": True}}, "hosts"),
    ({"ingress": {"paths": ["v1"]}}, "paths"),
    ({"httpRoute": {"enabled": True}}, "parentRefs"),
    ({"monitoring": {"interval": "often"}}, "interval"),
]


@pytest.mark.parametrize(("values", "name"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_the_schema_refuses_a_wrong_value_and_names_it(values: dict[str, Any], name: str) -> None:
    minimal = {} if values.get("models") == {} else {"models": {"qwen": {"path": "/models/qwen"}}}
    jsonschema.Draft7Validator(SCHEMA).validate(merged(DEFAULTS, {"models": {"qwen": {"path": "/models/qwen"}}}))
    errors = list(jsonschema.Draft7Validator(SCHEMA).iter_errors(merged(merged(DEFAULTS, minimal), values)))
    assert errors
    assert any(name in f"{'/'.join(map(str, error.absolute_path))} {error.message}" for error in errors)


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_the_templates_flags_and_variables_are_the_commands(name: str) -> None:
    fields = set(SETTINGS[name].model_fields)
    flags = set(re.findall(r"^ +- (?:{{ printf \")?--([a-z-]+)", template(name), re.MULTILINE))
    assert len(flags) >= 7
    assert {flag.replace("-", "_") for flag in flags} <= fields
    helpers = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    variables = set(re.findall(r"name: TIDEGATE_(\w+)", template(name) + helpers))
    assert {variable.lower() for variable in variables} <= fields and "REDIS_URL" in variables


@pytest.mark.parametrize("name", SETTINGS)
def test_no_further_argument_may_repeat_a_flag_of_the_template(name: str) -> None:
    used = set(re.findall(r"^ +- (?:{{ printf \")?(--[a-z-]+)", template(name), re.MULTILINE))
    (guarded,) = re.findall(r":= list ((?:\"--[a-z-]+\" ?)+)", template(name))
    assert used <= set(re.findall(r"--[a-z-]+", guarded))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_images_of_the_chart_are_those_of_the_dockerfile(name: str) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    part = DEFAULTS[name.removesuffix("s")]
    images = [value["repository"] for key, value in part.items() if key.startswith("image")]
    assert images and {image.removeprefix("tidegate-") for image in images} <= stages


def probes(name: str) -> dict[str, str]:
    """Return the paths of a template's probes, by kind."""
    found = re.findall(r"(\w+)Probe:\n +httpGet: {path: (\S+), port: \w+}", template(name))
    return dict(found)


def test_probes_of_workers_ask_for_what_a_worker_answers() -> None:
    health = WorkerHealth(SystemClock(), lambda: "", lambda: b"")
    assert probes("workers") == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    assert all(health.answer(path)[0] == HTTPStatus.OK for path in (*probes("workers").values(), "/metrics"))


async def test_probes_of_gateways_and_the_scaler_ask_for_what_a_gateway_answers() -> None:
    assert probes("gateway") == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    (scale,) = re.findall(r'"http://.*:%v(/\S*)\?model=%s"', template("workers"))
    async with running_stand() as stand:
        for path in (*probes("gateway").values(), "/metrics", scale):
            answer = await stand.http.get(path)
            assert answer.status_code == 200, path
    (located,) = re.findall(r"valueLocation: (\w+)", template("workers"))
    assert isinstance(answer.json()[located], int)


# -- documentation -----------------------------------------------------------------------------------------------------


def test_every_value_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [*DEFAULTS, *DEFAULTS["modelDefaults"]]
    placement = {"nodeSelector", "tolerations", "affinity", "runtimeClassName", "priorityClassName"}
    plain = {"podAnnotations", "extraEnv", "imagePullSecrets", "logLevel"} | placement
    assert [name for name in names if name not in plain and not re.search(rf"`[\w.]*{name}\b", text)] == []


def test_values_in_the_documentation_fit_the_schema() -> None:
    blocks = [yaml.safe_load(block) for block in fences(PAGE, "yaml")]
    values = [block for block in blocks if "apiVersion" not in block]
    assert len(values) >= 3
    for block in values:
        minimal = {} if "models" in block else {"models": {"qwen": {"path": "/models/qwen"}}}
        jsonschema.Draft7Validator(SCHEMA).validate(merged(merged(DEFAULTS, minimal), block))
