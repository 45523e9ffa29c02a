"""Settings: their sources, and the flags of a child process."""

import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from pydantic import SecretStr, ValidationError
from pydantic_settings import CliApp

from tidegate import cli
from tidegate.cli import main
from tidegate.settings.base import CONFIG_VARIABLE, CommonSettings, SettingsError
from tidegate.settings.commands import ServeSettings, check_file
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.keeper import KILL_GRACE_S

WEBHOOK_SECRET = "whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def test_a_flag_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tidegate.yaml"
    file.write_text("port: 1\nhost: 0.0.0.0\nmax_body_mb: 3\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    monkeypatch.setenv("TIDEGATE_PORT", "2")
    monkeypatch.setenv("TIDEGATE_HOST", "::1")
    settings = CliApp.run(ServeSettings, cli_args=["--port", "3"])
    assert (settings.port, settings.host, settings.max_body_mb) == (3, "::1", 3)


@pytest.mark.parametrize("given", [["a,b"], ["a", "b"], ["a", " b "]])
def test_several_names_for_one_model(given: list[str]) -> None:
    assert ServeSettings(served_model_name=given).model_names == ("a", "b")


@pytest.mark.parametrize("kind", [GatewaySettings, WorkerSettings])
def test_a_child_gets_the_settings_of_its_parent(
    kind: type[GatewaySettings | WorkerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = ServeSettings(
        served_model_name=["a", "b"],
        allowed_origins=["null", "http://localhost:*"],
        model="/m",
        redis_url="redis://:sesame@store:6379/0",
        threads=3,
        prefix_cache=False,
        swap_mb=0,
        port=9,
        drain_s=2,
        api_key=SecretStr("sk-sesame,sk-sesame-2"),
        adapters=["mine=/adapters/mine", "yours=org/adapter=1"],
        vllm_args="--enforce-eager",
        engine="openai",
        image_tokens=900,
        upstream="http://host:1",
        upstream_api_key=SecretStr("sk-sesame-up"),
        webhook_secret=SecretStr(WEBHOOK_SECRET),
        oidc_issuer="https://provider.example",
        oidc_client_id="tidegate",
        oidc_client_secret=SecretStr("sesame-oidc"),
        oidc_roles=["groups=sre:admin", "groups=dev:read"],
    )
    assert parent.operator_keys == ["sk-sesame", "sk-sesame-2"]
    for name, value in parent.secret_env.items():
        monkeypatch.setenv(name, value)
    child = CliApp.run(kind, cli_args=cli.joined_vllm_args(list(parent.flags(kind))))
    assert {name: getattr(child, name) for name in kind.model_fields} == {
        name: getattr(parent, name) for name in kind.model_fields
    }
    assert not any("sesame" in flag or WEBHOOK_SECRET in flag for flag in parent.flags(kind)), (
        "command lines are public"
    )


def test_adapters_are_further_model_names() -> None:
    settings = ServeSettings(model="/m", adapters="mine=/adapters/mine,yours=org/adapter=1")  # type: ignore[arg-type]
    assert settings.model_names == ("m", "mine", "yours")
    assert settings.adapter_paths == {"mine": "/adapters/mine", "yours": "org/adapter=1"}


@pytest.mark.parametrize(
    ("values", "way_out"),
    [
        *(({"adapters": wrong}, "NAME=PATH") for wrong in ("mine", "=path", "mine=")),
        *(
            ({"allowed_origins": [origin]}, "needs a scheme and no path")
            for origin in ("chat.example", "https://chat.example/app", "https:chat.example", "https://a b")
        ),
        *(({"engine": "openai"}, "--upstream http"), ({"upstream": "http://host:1"}, "--engine openai")),
        *(({"engine": "static"}, "needs --endpoint"), ({"endpoint": "http://localhost/run"}, "--engine static")),
        *(
            ({"exact": True, "engine": engine, **more}, f"not {engine}: {way}")
            for engine, way, more in (
                ("vllm", "set VLLM_BATCH_INVARIANT=1", {}),
                ("openai", "whether rows depend on each other is for its server", {"upstream": "http://host:1"}),
                ("embedding", "it generates no tokens", {}),
                ("static", "it generates no tokens", {"endpoint": "http://localhost/run"}),
            )
        ),
        *(
            ({"kv_cache_dtype": "fp8", "engine": engine, **more}, f"not {engine}: {way}")
            for engine, way, more in (
                ("vllm", "use --vllm-args", {}),
                ("openai", "its server chooses it", {"upstream": "http://host:1"}),
                ("embedding", "it has no KV cache", {}),
            )
        ),
        ({"ssl_keyfile": "key.pem"}, "--ssl-certfile"),
        ({"trusted_proxies": ["nginx"]}, "nginx"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_sentence(values: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValidationError, match=way_out):
        ServeSettings(**values)


@pytest.mark.parametrize("given", [["--vllm-args", "--enforce-eager"], ["--vllm-args=--enforce-eager"]])
def test_the_flags_of_vllm_may_look_like_flags_of_the_command(given: list[str]) -> None:
    assert cli.joined_vllm_args(["--engine", "vllm", *given]) == ["--engine", "vllm", "--vllm-args=--enforce-eager"]


def test_allowed_origins_come_from_a_flag_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tidegate.yaml"
    file.write_text("allowed_origins: ['*']\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert CliApp.run(GatewaySettings, cli_args=[]).allowed_origins == ["*"]
    monkeypatch.setenv("TIDEGATE_ALLOWED_ORIGINS", "app://obsidian.md, null")
    assert CliApp.run(GatewaySettings, cli_args=[]).allowed_origins == ["app://obsidian.md", "null"]
    flag = "https://chat.example/,chrome-extension://*"
    settings = CliApp.run(GatewaySettings, cli_args=["--allowed-origins", flag])
    assert settings.allowed_origins == ["https://chat.example/", "chrome-extension://*"]


@pytest.mark.parametrize("key", ["prot", "config"])
def test_an_unknown_key_in_a_file_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "tidegate.yaml"
    file.write_text(f"{key}: 1\n")
    with pytest.raises(SettingsError, match=key):
        check_file(file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            (["serve", *args], "--config needs a FILE")
            for args in (["--config"], ["--config="], ["--config=", "--port"])
        ),
        (["serve", "--api-keys", "sk-sesame"], "TIDEGATE_API_KEY"),
        (["serve", "--webhook-secret", "sesame"], "openssl rand"),
        *(
            (["gateway", "--redis-url", f"{scheme}://:sesame@store"], "--redis-url")
            for scheme in ("http", "redis+sentinel")
        ),
    ],
)
def test_a_wrong_flag_is_a_sentence_that_repeats_no_secret(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error and "sesame" not in error


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tidegate.keys.run_keys", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["keys"])
    assert ended.value.code == 130


def test_an_output_that_nobody_reads_any_more_ends_a_command_without_a_traceback() -> None:
    """As in `tidegate batch list | head -1`. The text is written when the program ends, or before."""
    program = "import sys; sys.argv[1:] = ['--help']; from tidegate.cli import main; main()"
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_function_and_settings(command: str) -> None:
    function, kind = cli.COMMANDS[command]
    assert callable(resolve_name(function))
    assert kind is None or issubclass(resolve_name(f"tidegate.settings.{kind}"), CommonSettings)


def test_compose_waits_longer_than_drain_and_kill_grace() -> None:
    compose = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8"))
    grace_s = float(compose["x-part"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > ServeSettings().drain_s + KILL_GRACE_S


def test_the_address_says_https_if_there_is_a_certificate() -> None:
    assert ServeSettings(port=8000).root_url == "http://127.0.0.1:8000"
    assert ServeSettings(port=8000, host="::1", ssl_certfile=Path("cert.pem")).root_url == "https://[::1]:8000"
