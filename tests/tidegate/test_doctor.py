"""`tidegate doctor`, on this machine: what it finds, and the way out that it names."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import fsspec
import pytest
from redis import Redis

from scheduler.store import durability
from tests.scheduler.store.nodes import server_cluster, server_pair
from tidegate.doctor.command import CHECKS, EX_FAILED, findings, run_doctor
from tidegate.doctor.machine import Finding, Level
from tidegate.settings.commands import DoctorSettings
from tidegate.valkey import EmbeddedValkey, running_valkey


def settings(tmp_path: Path, **changes: Any) -> DoctorSettings:
    return DoctorSettings(_cli_parse_args=False, **{"data_dir": tmp_path / "data", "port": 0, **changes})  # type: ignore[call-arg]


def found(of: DoctorSettings, *subjects: str) -> list[Finding]:
    return list(findings(of, [(subject, check) for subject, check in CHECKS if subject in subjects]))


def test_a_good_machine_passes_and_nothing_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(settings(tmp_path, trial=True)) == 0
    said = capsys.readouterr().out
    assert "the engine starts" in said and "can run with these settings" in said and "error" not in said
    assert not (tmp_path / "data").exists()


def test_each_mistake_is_found_though_another_came_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = settings(
            tmp_path,
            port=port,
            tiers=tmp_path / "no-tiers.yaml",
            api_keys=tmp_path / "no-keys.yaml",
            ssl_certfile=tmp_path / "no-certificate.pem",
            redis_url="redis://127.0.0.1:1",
            model=str(tmp_path / "no-model"),
        )
        assert run_doctor(wrong) == EX_FAILED
    said = capsys.readouterr().out
    for text in ("no-tiers.yaml", "no-keys.yaml", "no-certificate.pem", "no-model", "--redis-url", f":{port}"):
        assert text in said
    assert "cannot run with these settings" in said


@pytest.mark.parametrize(
    ("subject", "changes", "level", "said"),
    [
        ("keys", {"host": "0.0.0.0"}, Level.WARNING, "--api-keys"),  # noqa: S104
        ("data", {"disk_reserve_mb": 2**40}, Level.ERROR, "--disk-reserve-mb"),
        ("upstream", {"engine": "openai", "upstream": "http://127.0.0.1:1"}, Level.ERROR, "http://127.0.0.1:1"),
        ("store", {}, Level.ERROR, "is in use by process"),
    ],
)
def test_what_is_wrong_is_told_with_its_cause_or_a_way_out(
    subject: str, changes: dict[str, Any], level: Level, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.doctor.server.UPSTREAM_LIMIT_S", 0.2)
    with EmbeddedValkey(tmp_path / "data"):
        [finding] = found(settings(tmp_path, **changes), subject)
    assert finding.level is level and said in finding.text + finding.remedy


@pytest.mark.parametrize(
    ("max_memory", "policy", "said"),
    [
        ("0", "noeviction", []),
        ("65mb", "noeviction", []),
        ("64mb", "noeviction", ["maxmemory is 64 MB, and --store-mb 64"]),
        ("1gb", "allkeys-lru", ["maxmemory-policy is allkeys-lru"]),
    ],
)
def test_a_store_that_is_full_before_its_budget_or_that_evicts_is_a_warning(
    max_memory: str, policy: str, said: list[str], tmp_path: Path
) -> None:
    with running_valkey(tmp_path) as url, Redis.from_url(url) as client:
        client.config_set("maxmemory", max_memory, "maxmemory-policy", policy)
        store = found(settings(tmp_path, redis_url=url, store_mb=64), "store")
    warnings = [finding.text for finding in store if finding.level is Level.WARNING]
    assert len(warnings) == len(said)
    assert all(part in text for part, text in zip(said, warnings, strict=True))


async def test_the_replicas_that_must_confirm_are_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "REPLICAS_S", 0.1)
    with server_pair(tmp_path) as pair:
        await pair.start()
        of_one, of_two = (settings(tmp_path, redis_url=pair.url, store_replicas=count) for count in (1, 2))
        said = await asyncio.to_thread(found, of_one, "store")
        assert said[1].level is Level.OK and "at 1 of its replicas" in said[1].text
        said = await asyncio.to_thread(found, of_two, "store")
    assert (
        said[1].level is Level.ERROR
        and "connected replicas: 1" in said[1].text
        and "--store-replicas" in said[1].remedy
    )


@pytest.mark.full
async def test_what_a_cluster_does_for_a_deployment_is_said_and_a_url_of_one_node_is_an_error(tmp_path: Path) -> None:
    with server_cluster(tmp_path) as cluster:
        await cluster.start()
        said = await asyncio.to_thread(found, settings(tmp_path, redis_url=cluster.url), "store")
        assert any("the primary that has the slot of {tidegate}: serves this" in finding.text for finding in said)
        assert not [finding for finding in said if finding.level is Level.ERROR]
        for node in cluster.nodes:
            said = await asyncio.to_thread(found, settings(tmp_path, redis_url=node.valkey.url), "store")
            [wrong] = [finding for finding in said if finding.level is Level.ERROR]
            assert "redis+cluster://" in wrong.text + wrong.remedy


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        ("keys: [{name: a, key: b, tiers: [nope]}]", Level.ERROR, "key 'a': there is no tier 'nope'"),
        ("keys: []", Level.WARNING, "lets nobody in"),
        ("keys: [{name: a, key: b, tiers: [bulk]}]", Level.OK, "1 secrets"),
    ],
)
def test_a_keys_file_is_read_as_a_gateway_reads_it(text: str, level: Level, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    [finding] = found(settings(tmp_path, api_keys=file), "keys")
    assert finding.level is level and said in finding.text
    [finding] = found(settings(tmp_path, api_keys=file, model=f"a={tmp_path},b={tmp_path}"), "keys")
    assert finding.level is level


def test_an_open_server_with_a_key_is_no_finding(tmp_path: Path) -> None:
    assert not found(settings(tmp_path, host="0.0.0.0", api_key="secret"), "keys")  # noqa: S104


def test_the_storage_of_files_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found(settings(tmp_path), "storage")
    for url in ("memory://doctor", f"file://{tmp_path}/shared"):
        [finding] = found(settings(tmp_path, files_url=url), "storage")
        assert finding.level is Level.OK
    [finding] = found(settings(tmp_path, files_url="s4://bucket"), "storage")
    assert finding.level is Level.ERROR and "--files-url s4://bucket" in finding.text
    pytest.importorskip("s3fs")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:1", "anon": True})
    [finding] = found(settings(tmp_path, files_url="s3://bucket"), "storage")
    assert finding.level is Level.ERROR and "does not answer" in finding.text


def test_a_machine_without_a_compiler_is_told_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels = next(f for f in found(settings(tmp_path, device="cpu"), "engine") if f.subject == "kernels")
    assert kernels.level is Level.WARNING and "C++ compiler" in kernels.remedy


def test_an_embedding_model_is_checked_without_its_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    [chat] = found(settings(tmp_path, engine="embedding", model=str(model)), "engine")
    assert chat.level is Level.ERROR and "--kind embedding" in chat.text
    (model / "modules.json").write_text("[]", encoding="utf-8")
    [encoder] = found(settings(tmp_path, engine="embedding", model=str(model)), "engine")
    assert encoder.level is Level.OK and "sentence-transformers" in encoder.text


def test_a_model_too_large_for_the_memory_is_an_error(tmp_path: Path) -> None:
    from loadtest.model_shapes import write_shape

    write_shape(tmp_path / "huge", "8b", 2048)
    config = (
        (tmp_path / "huge" / "config.json").read_text().replace('"num_hidden_layers": 32', '"num_hidden_layers": 640')
    )
    (tmp_path / "huge" / "config.json").write_text(config)
    large = settings(tmp_path, model=str(tmp_path / "huge"), load_format="dummy", device="cpu", optimize=False)
    memory = next(f for f in found(large, "engine") if f.subject == "memory")
    assert memory.level is Level.ERROR and "quantised" in memory.remedy
