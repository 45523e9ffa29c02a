"""The models of a deployment: `--model NAME=PATH` for one or a few, `--models FILE` for all that can be said of them.

Knows names and what a request may name; does not load anything.
"""

from collections import Counter
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.interface import ModelKind
from scheduler.yaml_file import YamlFault, read_yaml


class ModelsError(ValueError):
    """The models cannot be used. The message is for the operator."""


class ModelEntry(BaseModel):
    """One model. `path` is a directory, hub id or GGUF file; the gateway reads its tokenizer from there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, AfterValidator(expanduser)]
    aliases: tuple[str, ...] = ()
    tiers: Path | None = None  # None: the file of --tiers
    fallback: str | None = None  # the model that answers while no worker of this one is alive
    kind: ModelKind | None = None  # None: what its files say
    image_tokens: Annotated[int, Field(ge=0, le=2**16)] = 0  # as --image-tokens


class ModelsFile(BaseModel):
    """The content of the file of --models. A split shares the requests that name it out among models, by weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[dict[str, ModelEntry], Field(min_length=1)]
    splits: dict[str, dict[str, Annotated[int, Field(ge=0)]]] = {}

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [*self.models, *self.splits, *(alias for entry in self.models.values() for alias in entry.aliases)]
        for name, count in Counter(names).items():
            if count > 1 or not name:
                raise ValueError(f"{name!r} is the name of more than one model, alias or split" if name else "no name")
        for name, entry in self.models.items():
            if entry.fallback is not None and (entry.fallback == name or entry.fallback not in self.models):
                raise ValueError(f"models.{name}.fallback: {entry.fallback!r} is not another one of the models")
        for name, weights in self.splits.items():
            if unknown := sorted(set(weights) - set(self.models)):
                raise ValueError(f"splits.{name}: {unknown[0]!r} is not one of the models")
            if not sum(weights.values()):
                raise ValueError(f"splits.{name}: no model has a weight above 0")
        return self


def read_models(path: Path) -> ModelsFile:
    """Return the models of a file. Raises `ModelsError` with the place of the first mistake."""
    try:
        return ModelsFile.model_validate(read_yaml(path))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        text = fault["msg"].removeprefix("Value error, ")
        raise ModelsError(f"{path}: {place + ': ' if place else ''}{text}") from error
    except YamlFault as error:
        raise ModelsError(str(error)) from error


def named_models(model: str | None) -> dict[str, str]:
    """Return the models of `--model NAME=PATH,NAME=PATH` by name; empty for a path alone, even with a "="."""
    entries = (model or "").split(",")
    pairs = [entry.partition("=") for entry in entries]
    if not all(name and equals and path for name, equals, path in pairs) or Path(model or "").exists():
        return {}
    if any(name.startswith(("/", ".", "~")) for name, _, _ in pairs):
        return {}
    return {name: expanduser(path) for name, _, path in pairs}
