"""YAML files that people write: what is wrong is said with its line, and a key that stands twice is a mistake.

Knows YAML. Does not know what a file says.
"""

from pathlib import Path
from typing import Any

import yaml


class YamlFault(Exception):
    """A file cannot be read, or a text is not YAML. The message says what is wrong, and on which line."""


class _KeyTwice(yaml.constructor.ConstructorError):
    """A mapping has the same key twice. Names of keys are no secrets."""


class StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a mapping with the same key twice; YAML's own takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    fault = f"the key {key.value!r} stands twice"
                    raise _KeyTwice(None, None, fault, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, *, has_secrets: bool = False) -> Any:
    """Return the content of the file. Raises `YamlFault` with the file's name, also if it cannot be read."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), has_secrets=has_secrets)
    except OSError as error:
        raise YamlFault(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise YamlFault(f"{path}: not UTF-8") from error
    except YamlFault as error:
        raise YamlFault(f"{path}: {error}") from error


def parse_yaml(text: str, loader: type[StrictLoader] = StrictLoader, *, has_secrets: bool = False) -> Any:
    """Return the content of a text. Raises `YamlFault`; if the text has secrets, its message quotes no values of it."""
    try:
        return yaml.load(text, loader)  # noqa: S506  # it is a SafeLoader
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f": line {mark.line + 1}"
        is_shown = problem and (not has_secrets or isinstance(error, _KeyTwice))
        raise YamlFault(f"not YAML{line}" + (f": {problem}" if is_shown else "")) from error
    except ValueError as error:  # such as of a date that does not exist
        raise YamlFault("not YAML" + ("" if has_secrets else f": {error}")) from error
    except RecursionError as error:
        raise YamlFault("not YAML: it is nested too deeply") from error
