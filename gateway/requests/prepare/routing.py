"""Apply the routing rules of `tiers.yaml`: which rule chooses the tier of a request, and which model it means.

Knows rules, and what HTTP clients send; does not know tiers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from scheduler.routing import Routing, RoutingRule, Texts


@dataclass(frozen=True, slots=True)
class Routed:
    """The rule that chose a tier, by its name."""

    name: str
    tier: str


@dataclass(frozen=True, slots=True)
class Sent:
    """What a client has sent. Names of headers are in lower case; `key` is the name of the API key, if there is one."""

    path: str
    headers: Mapping[str, str]
    key: str | None
    body: Mapping[str, Any]


def routed(routing: Routing, sent: Sent) -> Routed | None:
    """Return the first rule that `sent` meets; None if there is none."""
    found = ((name, rule) for name, rule in routing.active.items() if _meets(sent, rule))
    return next((Routed(name, rule.tier) for name, rule in found), None)


def served_model(routing: Routing, model: str, names: Collection[str]) -> str:
    """Return the one of the served `names` that `model` means: itself, or without the suffix of a rule."""
    if model in names:
        return model
    suffixes = (rule.model_suffix for rule in routing.active.values() if rule.model_suffix is not None)
    bare = (model.removesuffix(suffix) for suffix in suffixes if model.endswith(suffix))
    return next((name for name in bare if name in names), model)


def listed_models(routing: Routing, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`, and those with the suffixes of the rules that want to be listed."""
    suffixes = [rule.model_suffix for rule in routing.active.values() if rule.listed and rule.model_suffix]
    return (*names, *(name + suffix for suffix in suffixes for name in names))


def _meets(sent: Sent, rule: RoutingRule) -> bool:
    model = sent.body.get("model")
    return (
        (rule.model is None or _is_one_of(model, rule.model))
        and (rule.model_suffix is None or (isinstance(model, str) and model.endswith(rule.model_suffix)))
        and (rule.path is None or _is_one_of(sent.path, rule.path))
        and (rule.key is None or _is_one_of(sent.key, rule.key))
        and all(_is_one_of(sent.headers.get(name.lower()), texts) for name, texts in rule.header.items())
        and all(_is_one_of(_field(sent.body, name), texts) for name, texts in rule.field.items())
    )


def _field(body: Mapping[str, Any], path: str) -> object:
    """Return the value of a field, such as `metadata.job`; None if there is none."""
    value: object = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_one_of(value: object, texts: Texts) -> bool:
    """Whether a text, a number or a bool is one of `texts`. It is compared as JSON writes it."""
    if isinstance(value, bool):
        value = str(value).lower()
    patterns = (text.replace("[", "[[]").replace("?", "[?]") for text in texts)
    return isinstance(value, str | int | float) and any(fnmatchcase(str(value), pattern) for pattern in patterns)
