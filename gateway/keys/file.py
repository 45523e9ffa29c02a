"""The file of API keys: what it may contain, and how it is read.

Knows YAML and tiers; does not know HTTP, or when the file is read again (gateway/keys/source.py does). The file has the
form `keys: [{name, key | sha256, tiers?, default_tier?, role?, requests_per_minute?, …}]`. It may also have `projects`,
whose limits several keys share, and `prices`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.identity import ApiKey, Budget, KeyWebhook, Project
from gateway.keys.prices import NANO, Price
from gateway.keys.webhooks import secret_bytes, url_fault
from gateway.protocol.bodies.validation import first_fault
from scheduler.config import TierSet
from scheduler.yaml_file import YamlFault, parse_yaml

ID_DIGITS = 8  # hex digits of the digest that name one key in lists; enough to tell thousands of keys apart

Limit = Annotated[int, Field(ge=1, le=2**40)]
# Its nano are exact in the scripts' numbers, for which 0 of them is no budget.
Cost = Annotated[float, Field(ge=1 / NANO, le=10**6, allow_inf_nan=False)]
PricePerMillion = Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)]


class KeyringError(Exception):
    """The API keys cannot be used. The message names the file and the key."""


class WebhookEntry(BaseModel):
    """The webhook of a key. Which addresses it may reach is decided when it is called."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    secret: str
    url: str | None = None

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, value: str) -> str:
        secret_bytes(value)
        return value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and (fault := url_fault(value)):
            raise ValueError(fault)
        return value


class BudgetEntry(BaseModel):
    """The budget of a key or a project."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None
    cost_per_day: Cost | None = None
    cost_per_month: Cost | None = None

    @property
    def has_cost(self) -> bool:
        return self.cost_per_day is not None or self.cost_per_month is not None


class ProjectEntry(BaseModel):
    """A project: limits that its keys share."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1, max_length=128)
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    budget: BudgetEntry | None = None

    def to_project(self) -> Project:
        options = self.model_dump(exclude={"budget"})
        return Project(budget=_budget(self.budget), **options)


class PriceEntry(BaseModel):
    """Prices of a million tokens. Without a model or a tier, for all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str | None = None
    tier: str | None = None
    input: PricePerMillion
    cached: PricePerMillion | None = None
    output: PricePerMillion

    def to_price(self) -> Price:
        return Price(**self.model_dump())


class KeyEntry(BaseModel):
    """One key of the file. Entries of the same name are several secrets of one key, and agree in all other fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1, max_length=128)
    key: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    tiers: Annotated[list[str], Field(min_length=1)] | None = None
    default_tier: str | None = None
    admin: bool = False  # the role admin, as older files say it
    role: Literal["read", "operate", "admin"] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    budget: BudgetEntry | None = None
    project: str | None = None
    files_quota_mb: Limit | None = None
    # Older files call it `batch_weight`.
    weight: Annotated[int, Field(ge=1, le=1000, validation_alias=AliasChoices("weight", "batch_weight"))] = 1
    batch_concurrent_lines: Limit | None = None
    batch_enqueued_tokens: Limit | None = None
    webhook: WebhookEntry | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self

    @model_validator(mode="after")
    def _one_role(self) -> Self:
        if self.admin and self.role not in (None, "admin"):
            raise ValueError(f"admin: true is the role admin, and role says {self.role}")
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256((self.key or "").encode()).digest()

    @property
    def id(self) -> str:
        return self.digest.hex()[:ID_DIGITS]

    @property
    def options(self) -> dict[str, Any]:
        """The fields that are set, without the secret."""
        return self.model_dump(exclude={"key", "sha256"}, exclude_defaults=True)

    def to_key(self, projects: Mapping[str, ProjectEntry] | None = None) -> ApiKey:
        """Return the key. Its project is one of `projects`."""
        webhook = None if self.webhook is None else KeyWebhook(self.webhook.secret, self.webhook.url)
        tiers = frozenset(self.tiers) if self.tiers else None
        project = (projects or {})[self.project].to_project() if self.project is not None else None
        options = self.options | {"tiers": tiers, "webhook": webhook, "role": "admin" if self.admin else self.role}
        options.pop("admin", None)
        return ApiKey(sha256=self.digest, **options | {"budget": _budget(self.budget), "project": project})


def _budget(entry: BudgetEntry | None) -> Budget | None:
    return None if entry is None else Budget(**entry.model_dump())


class KeysFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[KeyEntry]
    projects: list[ProjectEntry] = []
    prices: list[PriceEntry] = []

    @property
    def by_name(self) -> dict[str, ProjectEntry]:
        return {project.name: project for project in self.projects}

    def to_keys(self) -> list[ApiKey]:
        return [entry.to_key(self.by_name) for entry in self.keys]

    def fault_of(self, entry: KeyEntry, tiers: TierSet | None) -> str:
        """Return what is wrong with the tiers, the project and the budget that a key names; empty if nothing is."""
        for name in (*(entry.tiers or ()), *((entry.default_tier,) if entry.default_tier else ())):
            if tiers is not None and name not in tiers.tiers:
                return f"there is no tier {name!r}"
        if entry.tiers and entry.default_tier and entry.default_tier not in entry.tiers:
            return "default_tier is not among its tiers"
        if entry.project is not None and entry.project not in self.by_name:
            return f"there is no project {entry.project!r}"
        project = self.by_name.get(entry.project or "")
        budgets = [one.budget for one in (entry, project) if one is not None and one.budget is not None]
        if any(budget.has_cost for budget in budgets) and not self.prices:
            return "a budget of cost needs `prices`"
        return ""


EMPTY = KeysFile(keys=[])


def read_file(path: Path, tiers: TierSet | None = None) -> KeysFile:
    """Return the content of the YAML file `path`.

    Raises `KeyringError` if the file is invalid, or names a tier that is not in `tiers` (None: tiers are not checked).
    """
    try:
        return parse_file(path, path.read_text(encoding="utf-8"), tiers)
    except OSError as error:
        raise KeyringError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyringError(f"{path}: not UTF-8") from error


def parse_file(path: Path, text: str, tiers: TierSet | None = None) -> KeysFile:
    """Return what `text`, the content of `path`, says. Raises the errors of `read_file`."""
    try:
        content = parse_yaml(text, has_secrets=True)
        if not isinstance(content, dict):
            raise KeyringError(f"{path}: must have the form `keys: [{{name: …, sha256: …}}, …]`")
        file = KeysFile.model_validate(content)
    except YamlFault as error:
        raise KeyringError(f"{path}: {error}") from error
    except ValidationError as error:
        raise KeyringError(f"{path}: {first_fault(error.errors(include_url=False)).message}") from None
    _check_names(path, file.keys)
    if len(file.by_name) < len(file.projects):
        raise KeyringError(f"{path}: two projects have the same name")
    for entry in file.keys:
        if fault := file.fault_of(entry, tiers):
            raise KeyringError(f"{path}: key {entry.name!r}: {fault}")
    return file


def read_entries(path: Path, tiers: TierSet | None = None) -> list[KeyEntry]:
    """Return the keys of the YAML file `path`. Raises the errors of `read_file`."""
    return read_file(path, tiers).keys


def parse_entries(path: Path, text: str, tiers: TierSet | None = None) -> list[KeyEntry]:
    """Return the keys in `text`, the content of `path`. Raises the errors of `read_file`."""
    return parse_file(path, text, tiers).keys


def _check_names(path: Path, entries: Sequence[KeyEntry]) -> None:
    first: dict[str, KeyEntry] = {}
    for entry in entries:
        if first.setdefault(entry.name, entry).options != entry.options:
            raise KeyringError(f"{path}: key {entry.name!r}: its entries differ in more than the secret")
    if len({entry.digest for entry in entries}) < len(entries):
        raise KeyringError(f"{path}: two entries have the same secret")
