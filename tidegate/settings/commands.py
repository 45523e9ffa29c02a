"""The settings of the commands that start several parts, and the check of a settings file."""

from pathlib import Path

import yaml
from pydantic import Field

from tidegate.settings.base import CommonSettings, SettingsError
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.worker import WorkerSettings


class ServeSettings(GatewaySettings, WorkerSettings):
    """Run a store, a worker and a gateway on this machine."""


class DoctorSettings(ServeSettings):
    """Check whether this machine can run `tidegate serve` with the same flags, and say what to do."""

    trial: bool = Field(default=False, description="also start the engine: load the weights and try its kernels")


class DemoSettings(CommonSettings):
    """Start everything, ask questions, and measure chat alone and beside bulk requests."""

    seconds: float = Field(default=30.0, gt=0, le=600, description="seconds of bulk requests beside chat")


def check_file(path: Path) -> None:
    """Raise `SettingsError` if the file cannot be read, or if it has a key that no command has.

    Otherwise, a misspelt key would go unnoticed.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
    known = (set(ServeSettings.model_fields) | set(DemoSettings.model_fields)) - {"config"}
    unknown = sorted(set(data or {}) - known) if isinstance(data, dict | None) else ["(not a mapping)"]
    if unknown:
        raise SettingsError(f"{path}: unknown key {', '.join(unknown)}")
