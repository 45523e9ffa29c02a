"""The parts of the rendered chart fit each other and the commands: flags, times, ports, volumes, names."""

import re
from pathlib import Path

import pytest
import yaml

from scheduler.config import parse_tiers
from tests.deploy.rendering import (
    SETTINGS,
    Resource,
    each_example,
    flags,
    matches,
    named,
    needs_helm,
    of_kind,
    parts,
    pods,
    rendered,
)
from tests.deploy.test_chart import ROOT
from tidegate.settings.models import ModelsFile

MARGIN_S = 20  # what a part needs after its drain, as docs/operations.md says

pytestmark = needs_helm


@each_example
def test_commands_take_their_flags_and_variables(path: Path) -> None:
    for command, _, container in parts(rendered(path)):
        given = dict(flags(container))
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
    models = ModelsFile.model_validate(yaml.safe_load(config["data"]["models.yaml"]))
    workers = [
        flags(container)["model"].partition("=") for command, _, container in parts(resources) if command == "worker"
    ]
    assert {name for name, _, _ in workers} == set(models.models) == set(values["models"])
    assert {name: path for name, _, path in workers} == {n: m["path"] for n, m in values["models"].items()}
    assert {n: m.kind for n, m in models.models.items()} == {n: m.get("kind") for n, m in values["models"].items()}
    assert models.splits == values.get("splits", {})


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


def test_who_may_read_metrics_reaches_gateways_and_workers() -> None:
    values = yaml.safe_load(named("everything").read_text(encoding="utf-8"))["networkPolicy"]
    policies = of_kind(rendered(named("everything")), "NetworkPolicy")
    peers = {policy["metadata"]["name"].split("-")[-1]: policy["spec"]["ingress"][0]["from"] for policy in policies}
    assert peers["worker"] == values["metricsFrom"]
    assert peers["gateway"] == values["gatewayFrom"] + values["metricsFrom"]
    everybody = of_kind(rendered(named("minimal")), "NetworkPolicy")
    assert [p["metadata"]["name"] for p in everybody if "from" in p["spec"]["ingress"][0]] == ["rel-tidegate-store"]


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
