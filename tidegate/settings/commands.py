"""The settings of the commands that start several parts, and the check of a settings file."""

import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field
from pydantic_settings import CliPositionalArg

from scheduler.yaml_file import YamlFault, read_yaml
from tidegate.settings.base import CommonSettings, SettingsError
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.models import ModelEntry
from tidegate.settings.worker import WorkerSettings


class ServeSettings(GatewaySettings, WorkerSettings):
    """Run a store, a worker and a gateway on this machine."""

    def workers(self) -> list[tuple[str, Self]]:
        """Return the settings of each worker, with the name of its part: one for each model.

        Workers of several models share the processor's cores. Raises `ModelsError`.
        """
        several = self.several_models()
        if several is None:
            return [("worker", self)]
        threads = self.threads or max(1, len(os.sched_getaffinity(0)) // len(several.models))
        return [
            (f"worker of {name}", self._worker_of(number, name, entry, threads))
            for number, (name, entry) in enumerate(several.models.items())
        ]

    def _worker_of(self, number: int, name: str, entry: ModelEntry, threads: int) -> Self:
        is_encoder = entry.kind in ("embedding", "rerank") and self.engine != "openai"
        update: dict[str, Any] = {
            "model": f"{name}={entry.path}",
            "kind": entry.kind,
            "image_tokens": entry.image_tokens,
            "engine": "embedding" if is_encoder else self.engine,
            "models": None,
            "worker_id": self.worker_id_of(number),
            "tiers": entry.tiers or self.tiers,
            "threads": threads,
            "health_port": self.health_port + number if self.health_port else 0,
        }
        return self.model_copy(update=update)

    def worker_id_of(self, number: int) -> str:
        """Return the id of the worker of the model with this number, counted from 0."""
        return str(self.worker_id) if number == 0 else f"{self.worker_id}-{number + 1}"

    def served_names(self) -> tuple[str, ...]:
        """Return the names of what is served, without aliases of several models. Raises `ModelsError`."""
        several = self.several_models()
        return self.model_names if several is None else (*several.models, *several.splits)


class BackupSettings(ServeSettings):
    """Write what the store and the storage of files hold into a new folder; the server may run meanwhile."""

    directory: CliPositionalArg[Path] = Field(description="the folder of the backup")


class RestoreSettings(BackupSettings):
    """Write a backup into an empty store and into the storage of files. No gateway and no worker may run meanwhile."""

    replace: Path | None = Field(
        default=None, description="replace what the store holds, after a backup of it into this new folder"
    )


class DoctorSettings(ServeSettings):
    """Check whether this machine can run `tidegate serve` with the same flags, and say what to do."""

    trial: bool = Field(default=False, description="also start the engine: load the weights and try its kernels")


class DemoSettings(CommonSettings):
    """Start everything, ask questions, and measure chat alone and beside bulk requests."""

    seconds: float = Field(
        default=30.0, gt=0, le=600, description="seconds of bulk requests beside chat; with --fleet, of two phases"
    )
    fleet: bool = Field(
        default=False,
        description="two gateways and three models instead: one is flooded, a worker is killed, the gateways restart",
    )


def check_file(path: Path) -> None:
    """Raise `SettingsError` if the file cannot be read, or if it has a key that no command has.

    Otherwise, a misspelt key would go unnoticed.
    """
    try:
        data = read_yaml(path, has_secrets=True)
    except YamlFault as error:
        raise SettingsError(str(error)) from error
    if not isinstance(data, dict | None):
        raise SettingsError(f"{path}: must have the form `port: 8000`, one setting a line")
    known = (set(ServeSettings.model_fields) | set(DemoSettings.model_fields)) - {"config"}
    unknown = sorted(str(key) for key in set(data or {}) - known)
    if unknown:
        raise SettingsError(f"{path}: unknown key {', '.join(unknown)}")
