"""Checks of the images and the compose file that need no Docker: names, paths, flags, and no torch."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.native.cpu import build
from scheduler.store import address
from tidegate.settings.base import CommonSettings
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.worker import WorkerSettings

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STAGES = re.findall(r"^FROM \S+ AS (\S+)$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
PARENTS = {name: parent for parent, name in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)}
PARTS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "worker-cpu": WorkerSettings,
}
# The services that run them, with their images.
TARGETS = {name: name for name in PARTS} | {f"gateway-{n}": "gateway" for n in (1, 2)}
TARGETS |= {f"worker-{n}": "worker-cpu" for n in (1, 2)}
FLEET = sorted(set(TARGETS) - set(PARTS))

NO_TORCH = """
import sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
"""


def instructions(target: str) -> str:
    """Return the Dockerfile's text of a target, after that of the stages that it continues."""
    before = instructions(PARENTS[target]) if PARENTS[target] in PARENTS else ""
    return before + dict(STAGES)[target]


def requirements(*flags: str) -> list[str]:
    script = [sys.executable, str(ROOT / "docker/requirements.py"), str(ROOT / "pyproject.toml"), *flags]
    return subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_requirements_are_the_projects_with_torch_separate() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rest, torch = requirements(), requirements("--torch")
    assert sorted(rest + torch) == sorted(project["dependencies"])
    assert len(torch) == 1 and torch[0].startswith("torch")
    assert any(line.startswith("transformers") for line in rest)


def test_the_images_have_what_traces_object_stores_sign_ins_gpus_and_encoders_need() -> None:
    used = re.findall(r"--extras ([\w ]+?) >", DOCKERFILE)
    named = [line.split(">")[0] for extra in used for line in requirements("--extras", *extra.split())]
    traces = ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
    oidc = ["authlib", "itsdangerous"]
    assert named == [*traces, "fsspec", "s3fs", *oidc, "nvidia-ml-py", "sentence-transformers"]


def test_a_gateway_starts_without_torch() -> None:
    """Everything that `tidegate gateway` imports, and the demo model's tokenizer, load without torch."""
    program = f"""{NO_TORCH}
import asyncio

import tidegate.cli
from tidegate.gateway.process import run_gateway
from tidegate.gateway.models import load_tokenizer
from tidegate.settings.gateway import GatewaySettings

tokenizer = load_tokenizer(GatewaySettings(), GatewaySettings().model_path)
assert asyncio.run(tokenizer.encode(["Repeat: k7Qz-09ab"], max_tokens=64))[0]
assert "torch" not in sys.modules
assert "tidegate.tracing.exporter" not in sys.modules, "OpenTelemetry is for processes that send traces"
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("service", TARGETS)
def test_every_service_uses_existing_flags_and_variables(service: str) -> None:
    definition, settings = SERVICES[service], PARTS[TARGETS[service]]
    command, *rest = definition["command"]
    assert command == TARGETS[service].removesuffix("-cpu")
    fields = {name.replace("_", "-") for name in settings.model_fields}
    assert {flag.removeprefix("--") for flag in rest if flag.startswith("--")} <= fields
    variables = {name for name in definition["environment"] if name.startswith("TIDEGATE_")}
    assert {name.removeprefix("TIDEGATE_").lower() for name in variables} <= set(settings.model_fields)
    assert "TIDEGATE_REDIS_URL" in variables


def test_variables_that_compose_leaves_empty_mean_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_MODEL", raising=False)
    default = GatewaySettings()
    monkeypatch.setenv("TIDEGATE_MODEL", "")
    assert GatewaySettings().model == default.model


@pytest.mark.parametrize("service", TARGETS)
def test_every_service_is_built_from_its_stage(service: str) -> None:
    assert SERVICES[service]["build"]["target"] == TARGETS[service]
    assert TARGETS[service] in dict(STAGES)


def test_each_profile_starts_one_kind_of_worker_and_none_starts_the_monitoring_unasked() -> None:
    profiles = {name: tuple(service.get("profiles", ())) for name, service in SERVICES.items()}
    assert profiles == {
        "valkey": (),
        "gateway": ("cpu", "gpu", "monitoring"),
        "worker": ("gpu",),
        "worker-cpu": ("cpu",),
        "prometheus": ("monitoring",),
        "grafana": ("monitoring", "fleet"),
        **dict.fromkeys((*FLEET, "proxy", "valkey-replica", "sentinel", "prometheus-fleet"), ("fleet",)),
    }


def services_of(*profiles: str) -> set[str]:
    """Return the services that these profiles start."""
    return {name for name, s in SERVICES.items() if not s.get("profiles") or set(s["profiles"]) & set(profiles)}


def test_the_profiles_start_what_they_did_before_there_was_a_fleet() -> None:
    for kind, worker in (("cpu", "worker-cpu"), ("gpu", "worker")):
        assert services_of(kind) == {"valkey", "gateway", worker}
        assert services_of(kind, "monitoring") == {"valkey", "gateway", worker, "prometheus", "grafana"}
    assert "gateway" not in services_of("fleet")


@pytest.mark.parametrize("profile", ["cpu", "gpu", "fleet"])
def test_no_two_services_of_a_profile_have_the_same_port_and_each_waits_for_services_of_it(profile: str) -> None:
    started = services_of(profile, *(["monitoring"] if profile != "fleet" else []))
    ports = [port for name in started for port in SERVICES[name].get("ports", [])]
    assert len(ports) == len(set(ports)) == 3
    assert {other for name in started for other in SERVICES[name].get("depends_on", {})} <= started


# -- the fleet ---------------------------------------------------------------------------------------------------------


def test_the_fleet_asks_sentinel_for_its_store() -> None:
    (url,) = {SERVICES[name]["environment"]["TIDEGATE_REDIS_URL"] for name in FLEET}
    script = SERVICES["sentinel"]["command"][-1]
    (service, host, port, quorum) = re.findall(r"'sentinel monitor (\w+) (\w+) (\d+) (\d+)'", script)[0]
    assert url == f"redis+sentinel://sentinel:26379/{service}/0" and address.parse(url)
    assert (host, port, quorum) == ("valkey", "6379", "1")
    primary, replica = SERVICES["valkey"]["command"], SERVICES["valkey-replica"]["command"]
    assert replica[: len(primary)] == primary
    assert replica[len(primary) :] == ["--replicaof", host, port, "--replica-announce-ip", "valkey-replica"]


def test_the_fleets_gateways_share_their_files_and_are_those_of_the_proxy() -> None:
    gateways = [name for name in FLEET if TARGETS[name] == "gateway"]
    volumes = [SERVICES[name]["volumes"] for name in gateways]
    assert volumes[0] == volumes[1] and "files:/var/lib/tidegate" in volumes[0]
    proxy = (ROOT / "docker/haproxy.cfg").read_text(encoding="utf-8")
    command = SERVICES[gateways[0]]["command"]
    port = command[command.index("--port") + 1]
    assert re.findall(r"^ +server (\S+) (\S+)$", proxy, re.MULTILINE) == [(n, f"{n}:{port}") for n in gateways]
    assert f"bind :{SERVICES['proxy']['ports'][0].split(':')[-1]}\n" in proxy
    hosts = SERVICES[gateways[0]]["environment"]["TIDEGATE_ALLOWED_HOSTS"]
    assert hosts == f"${{TIDEGATE_ALLOWED_HOSTS:-{','.join(gateways)}}}"  # Prometheus' names for them


def test_prometheus_scrapes_each_part_of_the_fleet() -> None:
    config = yaml.safe_load((ROOT / "docker/prometheus-fleet.yml").read_text(encoding="utf-8"))
    usual = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))
    jobs = config.pop("scrape_configs")
    assert [job["job_name"] for job in jobs] == [job["job_name"] for job in usual.pop("scrape_configs")]
    assert config == usual
    targets = [target for job in jobs for group in job["static_configs"] for target in group["targets"]]
    assert targets == [f"{name}:{8000 if TARGETS[name] == 'gateway' else 8001}" for name in FLEET]


@pytest.mark.parametrize("target", PARTS)
def test_images_run_unprivileged_and_stop_on_sigterm(target: str) -> None:
    """The user is a number, because Kubernetes' runAsNonRoot cannot look up a name."""
    text = instructions(target)
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == re.findall(r"useradd .*--uid (\d+)", text) == ["10001"]
    assert text.index("\nUSER ") > text.rindex("\nRUN ")
    assert "\nSTOPSIGNAL SIGTERM\n" in text and '\nENTRYPOINT ["tidegate"]\n' in text
    # The CUDA base image contains torch, and the gateway has none.
    assert ("torch.txt" in text) == (target == "worker-cpu")


@pytest.mark.parametrize("target", PARTS)
def test_only_the_image_with_triton_has_a_compiler(target: str) -> None:
    installed = re.findall(r"apt-get install [^&|;]*", instructions(target))
    compilers = [
        word for line in installed for word in line.split() if re.match(r"gcc|g\+\+|clang|build-ess|make", word)
    ]
    assert compilers == (["gcc"] if target == "worker" else [])


def test_the_kernels_are_compiled_by_a_stage_that_has_a_compiler_and_the_workers_torch() -> None:
    assert PARENTS["kernels"] == PARENTS["worker-cpu"] == "torch"
    assert "g++" in dict(STAGES)["kernels"] and "python -m engine.native.cpu.build" in dict(STAGES)["kernels"]
    (source, target) = re.findall(r"^COPY --from=kernels (\S+) (\S+)$", instructions("worker-cpu"), re.MULTILINE)[0]
    (environment,) = re.findall(r"-m venv (\S+)", instructions("kernels"))
    expected = Path(environment) / build._prebuilt_directory().relative_to(sys.prefix)
    assert source == target == str(expected)


def test_stages_copy_only_from_stages_before_them() -> None:
    names = [name for name, _ in STAGES]
    for i, (_, text) in enumerate(STAGES):
        assert set(re.findall(r"--from=(\S+)", text)) <= set(names[:i])


@pytest.mark.parametrize(
    ("target", "route"), [("gateway", "8000/health"), ("worker", "8001/livez"), ("worker-cpu", "8001/livez")]
)
def test_the_health_check_of_an_image_asks_for_a_route_that_needs_no_store(target: str, route: str) -> None:
    (command,) = re.findall(r"^HEALTHCHECK .*\n +CMD (\[.*\])$", instructions(target), re.MULTILINE)
    program, flag, code = json.loads(command)
    assert program.startswith("python") and flag == "-c" and f"http://127.0.0.1:{route}" in code
    compile(code, "health check", "exec")
    assert f"\nEXPOSE {route.split('/')[0]}\n" in instructions(target)


def test_the_drain_is_shorter_than_dockers_grace_period() -> None:
    drain_s = CommonSettings.model_fields["drain_s"].default
    for service in TARGETS:
        assert float(SERVICES[service]["stop_grace_period"].removesuffix("s")) > drain_s


def test_images_are_pinned() -> None:
    pulled = [s["image"] for s in SERVICES.values() if "image" in s]
    pulled += re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(pulled) == 9
    assert all(re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", image) for image in pulled), pulled


def test_mounted_files_exist_and_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume


def test_ports_are_open_only_to_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 5 and all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_each_part_on_its_port() -> None:
    config = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))
    command = SERVICES["gateway"]["command"]
    port = command[command.index("--port") + 1]
    gateways, workers = config["scrape_configs"]
    assert gateways["static_configs"] == [{"targets": [f"gateway:{port}"]}]
    (found,) = workers["dns_sd_configs"]
    assert set(found["names"]) == set(PARTS) - {"gateway"}
    for worker in found["names"]:
        assert f"TIDEGATE_HEALTH_HOST=0.0.0.0 TIDEGATE_HEALTH_PORT={found['port']}\n" in instructions(worker)


def test_the_build_context_contains_everything_that_the_wheel_needs() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    needed = {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "docker/requirements.py", *build["wheel"]["packages"]}
    needed |= set(build["wheel"]["force-include"])
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line[0] not in "#!"] == ["*", "**/__pycache__"]
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert kept == needed
    assert all((ROOT / path).exists() for path in kept)
