"""The Helm chart as a real Helm renders it: valid for Kubernetes and the operators, and its parts fit each other.

`make test-helm` has Helm and the schemas; without them, these tests say that they were skipped.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.config import parse_tiers
from tests.deploy.test_chart import CHART, NOT_YET, PAGE, ROOT, VALUES
from tests.test_docs import fences
from tidegate.settings.base import CommonSettings
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.worker import WorkerSettings

SETTINGS: dict[str, type[CommonSettings]] = {"gateway": GatewaySettings, "worker": WorkerSettings}
CUSTOM = ("keda.sh/", "gateway.networking", "monitoring.coreos", "ray.io/", "leaderworkerset", "serving.kserve")
MARGIN_S = 20  # what a part needs after its drain, as docs/operations.md says

Resource = dict[str, Any]

pytestmark = pytest.mark.skipif(shutil.which("helm") is None, reason="no `helm` on the PATH (make test-helm)")
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


# -- what others say of the manifests ----------------------------------------------------------------------------------


@each_example
def test_helm_finds_nothing_wrong(path: Path) -> None:
    ran = helm("lint", "--strict", "--with-subcharts", CHART, "--values", path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def check_schemas(resources: list[Resource], folder: Path) -> set[str]:
    """Check resources with Kubernetes' and the operators' schemas. Return the kinds of the latter."""
    tool = shutil.which("kubernetes-validate")
    if tool is None:
        pytest.skip("no `kubernetes-validate` on the PATH (make test-helm)")
    custom = [resource for resource in resources if resource["apiVersion"].startswith(CUSTOM)]
    own = [resource for resource in resources if resource not in custom]
    for name, group, command in (
        ("own", own, [tool, "--strict"]),
        ("custom", custom, [str(Path(tool).parent / "python"), "-m", "tests.deploy.crds", "check"]),
    ):
        if group:
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump_all(group))
            ran = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stdout + ran.stderr
    return {resource["kind"] for resource in custom}


@each_example
def test_manifests_fit_the_schemas(path: Path, tmp_path: Path) -> None:
    kinds = check_schemas(rendered(path), tmp_path)
    everything = {"ScaledObject", "TriggerAuthentication", "HTTPRoute", "PodMonitor", "PrometheusRule"}
    assert kinds == (everything if path == named("everything") else set())


def test_a_wrong_field_does_not_fit(tmp_path: Path) -> None:
    for kind, field in (("ScaledObject", "minReplicas"), ("Deployment", "replica")):
        resource = of_kind(rendered(named("everything")), kind)[0]
        wrong = {**resource, "spec": {**resource["spec"], field: 1}}
        with pytest.raises(AssertionError, match=field):
            check_schemas([wrong], tmp_path)


def test_manifests_in_the_documentation_fit_the_schemas(tmp_path: Path) -> None:
    blocks = [yaml.safe_load(block) for block in fences(PAGE, "yaml")]
    kinds = check_schemas([block for block in blocks if "apiVersion" in block], tmp_path)
    assert kinds == {"InferenceService", "LeaderWorkerSet", "RayService"}


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no `promtool` binary on the PATH (apt-get install prometheus)")
    (rule,) = of_kind(rendered(named("everything")), "PrometheusRule")
    shipped = yaml.safe_load((ROOT / "docker" / "prometheus-rules.yml").read_text(encoding="utf-8"))
    assert rule["spec"] == shipped
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    ran = subprocess.run([tool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# -- commands ----------------------------------------------------------------------------------------------------------


@each_example
def test_commands_take_their_flags_and_variables(path: Path) -> None:
    for command, _, container in parts(rendered(path)):
        given = {name: value for name, value in flags(container).items() if name not in NOT_YET}
        variables = [entry["name"] for entry in container["env"] if entry["name"].startswith("TIDEGATE_")]
        given |= {name.removeprefix("TIDEGATE_").lower(): None for name in variables if name.endswith("SECRET")}
        assert set(given) <= set(SETTINGS[command].model_fields)
        SETTINGS[command](**given)  # raises ValidationError
        assert {v.removeprefix("TIDEGATE_").lower() for v in variables} <= set(SETTINGS[command].model_fields)


@each_example
def test_pods_outlive_their_drain(path: Path) -> None:
    for _, pod, container in parts(rendered(path)):
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        needed_s = float(flags(container)["drain_s"]) + MARGIN_S + float(before[1])
        assert needed_s <= pod["terminationGracePeriodSeconds"] < needed_s + 1


@each_example
def test_probes_and_ports_are_those_of_the_commands(path: Path) -> None:
    for command, _, container in parts(rendered(path)):
        port = int(flags(container)["port" if command == "gateway" else "health_port"])
        assert [entry["containerPort"] for entry in container["ports"]] == [port]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] == container["ports"][0]["name"]


@pytest.mark.parametrize("seconds", [60, 3600, 7201])
def test_a_worker_has_its_time_to_start(seconds: int) -> None:
    resources = rendered(named("minimal"), f"modelDefaults.startupSeconds={seconds}")
    ((_, _, container),) = [part for part in parts(resources) if part[0] == "worker"]
    probe = container["startupProbe"]
    assert seconds <= probe["failureThreshold"] * probe["periodSeconds"] < seconds + probe["periodSeconds"]
    (worker,) = [d for d in of_kind(resources, "Deployment") if d["metadata"]["name"].endswith("worker-qwen")]
    assert worker["spec"]["progressDeadlineSeconds"] > seconds


@each_example
def test_each_model_has_a_name_at_gateways_and_workers(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    resources = rendered(path)
    (config,) = [r for r in of_kind(resources, "ConfigMap") if r["metadata"]["name"].endswith("-models")]
    models = yaml.safe_load(config["data"]["models.yaml"])
    workers = [
        flags(container)["model"].partition("=") for command, _, container in parts(resources) if command == "worker"
    ]
    assert {name for name, _, _ in workers} == set(models["models"]) == set(values["models"])
    assert {name: path for name, _, path in workers} == {n: m["path"] for n, m in values["models"].items()}
    assert all(set(m) <= {"path", "aliases", "kind", "tiers", "fallback"} for m in models["models"].values())
    assert models.get("splits", {}) == values.get("splits", {})


def test_tiers_are_valid_and_where_the_commands_read_them() -> None:
    resources = rendered(named("everything"))
    (config,) = [r for r in of_kind(resources, "ConfigMap") if r["metadata"]["name"].endswith("-tiers")]
    for name, text in config["data"].items():
        assert parse_tiers(yaml.safe_load(text), name)
    read = [value for _, _, c in parts(resources) if (value := flags(c).get("tiers"))]
    assert len(read) == 6 and {f"/etc/tidegate/tiers/{name}" for name in config["data"]} == set(read)


def test_a_change_of_tiers_restarts_the_gateways_and_no_worker() -> None:
    before, after = (
        {w["metadata"]["name"]: t for w, t in pods(rendered(named("everything"), *change))}
        for change in ((), ('tiers="default_tier: bulk"',))
    )
    assert {name for name in before if before[name] != after[name]} == {"rel-tidegate-gateway"}


# -- parts of the release ----------------------------------------------------------------------------------------------


@each_example
def test_selectors_find_what_they_are_for(path: Path) -> None:
    resources = rendered(path)
    labels = [(workload, template["metadata"]["labels"]) for workload, template in pods(resources)]
    for workload, own in labels:
        found = [w for w, other in labels if matches(workload["spec"]["selector"]["matchLabels"], other)]
        assert found == [workload] and matches(workload["spec"]["selector"]["matchLabels"], own)
    for kind, where in (("Service", ()), ("PodDisruptionBudget", ("matchLabels",)), ("PodMonitor", ("matchLabels",))):
        for resource in of_kind(resources, kind):
            selector = resource["spec"]["selector"]
            for key in where:
                selector = selector[key]
            assert any(matches(selector, own) for _, own in labels), resource["metadata"]["name"]
    budgets = of_kind(resources, "PodDisruptionBudget")
    assert len(budgets) in (0, sum(command in SETTINGS for command, _, _ in parts(resources)))


@each_example
def test_ports_are_open_where_others_call(path: Path) -> None:
    resources = rendered(path)
    open_ports = [
        (template["metadata"]["labels"], {port["name"] for c in template["spec"]["containers"] for port in c["ports"]})
        for _, template in pods(resources)
    ]

    def ports_of(selector: Resource) -> set[str]:
        found = [names for labels, names in open_ports if matches(selector, labels)]
        assert found
        return set.intersection(*found)

    for service in of_kind(resources, "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports_of(service["spec"]["selector"])
    for policy in of_kind(resources, "NetworkPolicy"):
        used = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert used == ports_of(policy["spec"]["podSelector"]["matchLabels"])
    for monitor in of_kind(resources, "PodMonitor"):
        used = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        assert used <= ports_of(monitor["spec"]["selector"]["matchLabels"])


@each_example
def test_volumes_secrets_and_config_maps_exist(path: Path) -> None:
    resources = rendered(path)
    made = {(r["kind"], r["metadata"]["name"]) for r in resources}
    given = set(re.findall(r"secret(?:Name)?: ([\w-]+)|secretRef: {name: ([\w-]+)}", path.read_text()))
    secrets = {name for pair in given for name in pair if name}
    for workload, template in pods(resources):
        pod = template["spec"]
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in pod.get("volumes", ())} | claims
        mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        for volume in pod.get("volumes", ()):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", "models")
            assert claim in ("models", "hub") or ("PersistentVolumeClaim", claim) in made
        for entry in (entry for c in pod["containers"] for entry in c.get("env", ()) if "valueFrom" in entry):
            assert entry["valueFrom"]["secretKeyRef"]["name"] in secrets, entry


@each_example
def test_containers_have_no_rights_and_write_to_volumes_only(path: Path) -> None:
    """Nor do variables that Kubernetes makes of Services' names become settings."""
    for _, template in pods(rendered(path)):
        pod = template["spec"]
        assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
    written = re.findall(r"(?:HF_HOME|TRITON_CACHE_DIR|TIDEGATE_DATA_DIR)=(\S+)", (ROOT / "Dockerfile").read_text())
    for command, _, container in parts(rendered(path)):
        writable = tuple(mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly"))
        home = [entry["value"] for entry in container["env"] if entry["name"] == "HOME"]
        paths = [*written, *home, *([flags(container)["data_dir"]] if command == "gateway" else [])]
        assert "/tmp" in writable and all(name.startswith(writable) for name in paths)


def test_the_scaler_asks_the_gateways_for_its_own_model() -> None:
    resources = rendered(named("everything"))
    workers = {d["metadata"]["name"]: d for d in of_kind(resources, "Deployment")}
    (service,) = [s for s in of_kind(resources, "Service") if s["metadata"]["name"].endswith("gateway")]
    address = f"http://{service['metadata']['name']}.llm.svc:{service['spec']['ports'][0]['port']}/admin/scale?model="
    urls = {}
    for scaled in of_kind(resources, "ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]["name"]
        assert "replicas" not in workers[target]["spec"]
        (trigger,) = scaled["spec"]["triggers"]
        urls[target] = trigger["metadata"]["url"]
        (authentication,) = of_kind(resources, "TriggerAuthentication")
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    assert urls == {
        "rel-tidegate-worker-org-llama-3-3": f"{address}Org%2Fllama-3.3",
        "rel-tidegate-worker-llama-b": f"{address}llama-b",
    }
    ((_, _, gateway),) = [part for part in parts(resources) if part[0] == "gateway"]
    assert "--scale-from-zero" in gateway["args"]
    one = rendered(named("everything"), "models.Org/llama-3\\.3.autoscaling.minReplicas=1")
    ((_, _, gateway),) = [part for part in parts(one) if part[0] == "gateway"]
    assert "--scale-from-zero" not in gateway["args"]


def test_jobs_have_the_names_that_the_alerts_use() -> None:
    config = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text(encoding="utf-8"))
    monitors = of_kind(rendered(named("everything")), "PodMonitor")
    jobs = [m["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] for m in monitors]
    assert sorted(jobs) == sorted(job["job_name"] for job in config["scrape_configs"])


REFUSED = [
    ('models.qwen.path=""', "models.qwen.path"),
    ('models.qwen.fallback="other"', "models.qwen.fallback"),
    ('models.qwen.engine="openai"', "models.qwen.upstream"),
    ('models.qwen.upstream="http://vllm"', "models.qwen.upstream"),
    ("models.qwen.autoscaling.enabled=true", "auth.operatorKey"),
    ("models.qwen.autoscaling.minReplicas=9", "maxReplicas"),
    ('models.Qwen={"path":"x"}', "rename one"),
    ('models.other={"path":"x","volume":{"hostPath":{"path":"/x"}}}', "mountPath"),
    ('splits={"a":{"other":1}}', "splits.a"),
    ('files.accessMode="ReadWriteOnce"', "files.accessMode"),
    ("gateway.privateDocs=true", "gateway.privateDocs"),
    ('gateway.extraArgs=["--drain-s=90"]', "gateway.extraArgs: --drain-s"),
    ('models.qwen.extraArgs=["--health-port","9"]', "models.qwen.extraArgs: --health-port"),
    ("drainSeconds=-1", "/drainSeconds"),
    ('gateway.imag={"tag":"1"}', "imag"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[change for change, _ in REFUSED])
def test_values_that_cannot_work_are_refused_by_name(change: str, message: str) -> None:
    ran = helm("template", "rel", CHART, "--values", named("minimal"), "--set-json", change)
    assert ran.returncode != 0 and message in ran.stderr


def test_the_notes_name_the_service_and_the_models(tmp_path: Path) -> None:
    """`helm install --dry-run=client` needs no cluster."""
    ran = helm("install", "rel", CHART, "--namespace", "llm", "--values", named("minimal"), "--dry-run=client")
    assert ran.returncode == 0, ran.stderr
    notes = ran.stdout.partition("NOTES:")[2]
    assert "http://rel-tidegate-gateway.llm.svc:8000/v1" in notes and "qwen" in notes and "No API key" in notes


def test_the_packed_chart_renders_the_same(tmp_path: Path) -> None:
    ran = helm("package", CHART, "--destination", tmp_path)
    assert ran.returncode == 0, ran.stderr
    (archive,) = tmp_path.glob("tidegate-*.tgz")
    packed = helm("template", "rel", archive, "--namespace", "llm", "--values", named("everything"))
    assert [r for r in yaml.safe_load_all(packed.stdout) if r] == rendered(named("everything"))
