"""The command lines and answers of podman and docker, by a program that stands for them; no container runs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.images.command import Findings, examine
from bench.images.containers import ContainerError, Containers, Image

HEALTH = {"Test": ["CMD", "python", "-c", "pass"], "Interval": 10}


class Program:
    """A program called podman that writes down its arguments, and prints what is set for its first argument."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "podman"
        self.path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/calls\n'
            f'[ -e {folder}/"$1".fails ] && {{ cat {folder}/"$1".fails >&2; exit 125; }}\n'
            f'[ -e {folder}/"$1" ] && cat {folder}/"$1"\nexit 0\n'
        )
        self.path.chmod(0o755)

    def prints(self, command: str, text: str) -> None:
        (self._folder / command).write_text(text)

    def fails(self, command: str, text: str) -> None:
        (self._folder / f"{command}.fails").write_text(text)

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    program = Program(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.fixture
def containers(program: Program) -> Containers:
    return Containers.found()


@pytest.mark.parametrize(
    "found",
    [
        {"Config": {"User": "10001", "Healthcheck": HEALTH}, "Size": 5},  # docker
        {"Config": {"User": "10001"}, "Healthcheck": HEALTH, "Size": 5},  # podman
    ],
)
def test_an_image_is_read_from_either_program(found: dict[str, Any], program: Program, containers: Containers) -> None:
    program.prints("image", json.dumps([found]))
    assert containers.image("some") == Image("10001", ("python", "-c", "pass"), 5)


def test_a_build_of_podman_keeps_the_health_check(program: Program, containers: Containers) -> None:
    containers.build(Path("/src"), "gateway", "some", ["--network", "host"])
    assert program.calls == ["build --format docker --target gateway --tag some --network host /src"]
    program.fails("build", "no such base")
    with pytest.raises(ContainerError, match="gateway"):
        containers.build(Path("/src"), "gateway", "some", [])


def test_a_container_is_removed_after_its_block_even_if_it_did_not_start(
    program: Program, containers: Containers
) -> None:
    with containers.running("some", "worker", flags=("--network", "none")) as name:
        program.prints("port", "127.0.0.1:4567\n[::1]:4568\n")
        assert containers.port(name, 8000) == 4567
    assert program.calls[0] == f"run --detach --name {name} --network none some worker"
    assert program.calls[-1] == f"rm --force --volumes {name}"
    program.fails("run", "a warning\nno rights\n")
    with pytest.raises(ContainerError, match=r"podman run: no rights$"), containers.running("some"):
        pass
    assert program.calls[-1].startswith("rm ")


def test_without_a_program_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ContainerError, match="install podman"):
        Containers.found()


def test_what_is_wrong_with_an_image_is_found(program: Program, containers: Containers) -> None:
    program.prints("image", json.dumps([{"Config": {"User": ""}, "Size": 3 << 20}]))
    program.prints("run", "0\n")
    findings = Findings()
    examine(containers, "gateway", "some", findings)
    assert all(findings.checks.values()) and len(findings.checks) == 3
    assert findings.figures == {"gateway: size": "3 MiB"}
