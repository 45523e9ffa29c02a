"""The rules of `tiers.yaml` that choose the tier of requests which name none: data and checks.

Does not know requests; gateway/requests/prepare/routing.py applies the rules.
"""

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# Texts that a value may be; `*` stands for any text. One text may be written without a list.
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list), Field(min_length=1)]
Named = dict[Annotated[str, Field(min_length=1)], Texts]
RuleName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]


class RoutingRule(BaseModel):
    """A tier for the requests that meet all conditions. The comments in tiers.yaml explain its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    tier: str
    header: Named = {}
    model: Texts | None = None
    model_suffix: Annotated[str, Field(min_length=2)] | None = None
    path: Texts | None = None
    key: Texts | None = None
    field: Named = {}
    listed: bool = False  # whether /v1/models has the model's names with `model_suffix`, too

    @model_validator(mode="after")
    def _has_conditions(self) -> Self:
        if not (self.header or self.model or self.model_suffix or self.path or self.key or self.field):
            raise ValueError("needs a condition: header, model, model_suffix, path, key or field")
        if self.listed and self.model_suffix is None:
            raise ValueError("listed: is for rules with a model_suffix")
        return self


class Routing(BaseModel):
    """The rules in their order: the first one that a request meets chooses its tier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    rules: dict[RuleName, RoutingRule] = {}

    @property
    def active(self) -> dict[str, RoutingRule]:
        return self.rules if self.enabled else {}
