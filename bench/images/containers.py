"""Images and containers, by the command line of podman or docker, which are alike in everything that is used here.

Knows their flags and what they print; does not know what runs in a container.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

PROGRAMS = ("podman", "docker")
CALL_LIMIT_S = 120.0  # for everything but builds
STOP_LIMIT_S = 50  # as in docker-compose.yml: longer than the drain


class ContainerError(Exception):
    """A command of the container program failed. The message is what it said."""


@dataclass(frozen=True, slots=True)
class Image:
    """What is written in an image."""

    user: str
    health_command: tuple[str, ...]  # with its arguments; empty: no health check
    num_bytes: int


class Containers:
    """The images and containers of this machine."""

    def __init__(self, program: str) -> None:
        self._program = program

    @classmethod
    def found(cls, program: str = "") -> Self:
        """Return those of `program`, or of the first program that is installed. Raises `ContainerError` if none is."""
        names = (program,) if program else PROGRAMS
        found = next((name for name in names if shutil.which(name)), None)
        if found is None:
            raise ContainerError(f"{' and '.join(names)} cannot be found: install podman (Debian has it)")
        return cls(found)

    def build(self, folder: Path, target: str, tag: str, flags: Sequence[str]) -> None:
        """Build a target of the Dockerfile in `folder`, and print what the program says to stderr."""
        # podman's own format of images has no health checks.
        image_format = ("--format", "docker") if Path(self._program).name == "podman" else ()
        command = [self._program, "build", *image_format, "--target", target, "--tag", tag, *flags, str(folder)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ContainerError(f"the target {target} of {folder / 'Dockerfile'} cannot be built")

    def image(self, tag: str) -> Image:
        [found] = json.loads(self._call("image", "inspect", tag))
        config: dict[str, Any] = found["Config"]
        health: dict[str, Any] = config.get("Healthcheck") or found.get("Healthcheck") or {}
        kind, *command = health.get("Test") or ["NONE"]
        return Image(config.get("User", ""), tuple(command) if kind == "CMD" else (), found["Size"])

    def remove_image(self, tag: str) -> None:
        self._call("rmi", "--force", tag)

    def run_once(self, tag: str, script: str) -> str:
        """Run a shell script in a new container of an image; return what it printed."""
        return self._call("run", "--rm", "--entrypoint", "sh", tag, "-c", script).strip()

    @contextmanager
    def running(self, tag: str, *command: str, flags: Sequence[str] = ()) -> Iterator[str]:
        """Start a container with `command` as its arguments, yield its name, and remove it in the end."""
        name = f"tidegate-check-{uuid4().hex[:8]}"
        try:
            self._call("run", "--detach", "--name", name, *flags, tag, *command)
            yield name
        finally:
            self._call("rm", "--force", "--volumes", name)

    def passes(self, name: str, command: Sequence[str]) -> bool:
        """Return whether a command in a running container exits with 0."""
        done = subprocess.run([self._program, "exec", name, *command], capture_output=True, timeout=CALL_LIMIT_S)
        return done.returncode == 0

    def port(self, name: str, inside: int) -> int:
        """Return this machine's port for the port `inside` of a container."""
        return int(self._call("port", name, str(inside)).splitlines()[0].rpartition(":")[2])

    def logs(self, name: str) -> str:
        return self._call("logs", name, stderr=subprocess.STDOUT)

    def terminate(self, name: str) -> None:
        """Send SIGTERM to the first process of a container; do not wait for its end."""
        self._call("kill", "--signal", "TERM", name)

    def exit_code(self, name: str) -> int:
        """Wait for the end of a container that has been told to end; return its exit code."""
        return int(self._call("wait", name, limit_s=STOP_LIMIT_S).split()[0])

    def start_again(self, name: str) -> None:
        self._call("start", name)

    def _call(self, *arguments: str, stderr: int = subprocess.PIPE, limit_s: float = CALL_LIMIT_S) -> str:
        """Return what the program prints. Raises `ContainerError` if it fails or takes longer than `limit_s`."""
        command = [self._program, *arguments]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ContainerError(f"{' '.join(command[:2])} takes more than {limit_s:.0f} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout or "").strip()
            raise ContainerError(f"{' '.join(command[:2])}: {said.splitlines()[-1] if said else done.returncode}")
        return done.stdout
