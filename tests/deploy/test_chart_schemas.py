"""The rendered chart is valid for Helm, Kubernetes, operators and Prometheus; values that cannot work are refused."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendering import Resource, each_example, helm, named, needs_helm, of_kind, rendered
from tests.deploy.test_chart import CHART, PAGE, ROOT
from tests.test_docs import fences

CUSTOM = ("keda.sh/", "gateway.networking", "monitoring.coreos", "ray.io/", "leaderworkerset", "serving.kserve")

pytestmark = needs_helm


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


REFUSED = [
    ('models.qwen.path=""', "models.qwen.path"),
    ('models.qwen.fallback="other"', "models.qwen.fallback"),
    ('models.qwen.engine="openai"', "models.qwen.upstream"),
    ('models.qwen.engine="embedding"', "models.qwen.kind"),
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
    ("drainSeconds=-1", "drainSeconds"),
    ('gateway.imag={"tag":"1"}', "imag"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[change for change, _ in REFUSED])
def test_values_that_cannot_work_are_refused_by_name(change: str, message: str) -> None:
    ran = helm("template", "rel", CHART, "--values", named("minimal"), "--set-json", change)
    assert ran.returncode != 0 and message in ran.stderr


def test_the_notes_name_the_service_and_the_models() -> None:
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
