"""`python -m bench vllm-surface PATH`: does a release of vLLM still have what our engine over it uses?

Reads vLLM's source without importing it, so a release need not be installed, or run on this machine: an unpacked wheel
or source archive is enough. Compares with the list in engine/vllm/surface.py.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliPositionalArg

from engine.vllm.surface import SURFACE, Used


@dataclass(slots=True)
class Definition:
    """What the source says of a name: members of a class with the parameters of each method, and required fields."""

    members: dict[str, set[str] | None] = field(default_factory=dict)  # parameters; None: no method, or any parameters
    required: list[str] = field(default_factory=list)  # fields without a default


class VllmSurface(BaseModel):
    """What a release of vLLM lacks of what our engine over it uses.

    PATH is the folder that contains vLLM's package, such as the site-packages of an environment, or an unpacked wheel.
    Fails if there is a difference.
    """

    path: CliPositionalArg[Path] = Field(description="Folder that contains the package vllm.")

    def cli_cmd(self) -> None:
        found = differences(self.path)
        for line in found:
            print(line)
        print(f"{len(found)} differences in {len(SURFACE)} names")
        if found:
            raise SystemExit(1)


def differences(path: Path, surface: Iterable[Used] = SURFACE) -> list[str]:
    """Return a line for each name, member, parameter or required field in which the vLLM in `path` differs."""
    source = Source(path)
    return [f"{used.module}.{used.name}: {fault}" for used in surface for fault in _faults(source, used)]


def _faults(source: "Source", used: Used) -> Iterator[str]:
    definition = source.find(used.module, used.name)
    if definition is None:
        yield "is missing"
        return
    names = [member.partition("(")[0] for member in used.members]
    for member, name in zip(used.members, names, strict=True):
        if name not in definition.members:
            yield f"has no {name}"
            continue
        known = definition.members[name]
        wanted = [word.strip() for word in member.partition("(")[2].removesuffix(")").split(",") if word.strip()]
        for parameter in wanted:
            if known is not None and parameter not in known:
                yield f"{name} has no parameter {parameter}"
    if used.is_built:
        for name in definition.required:
            if name not in names:
                yield f"needs {name}"


class Source:
    """The source of a release of vLLM, read module by module."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.module = cache(self._parse)

    def find(self, module: str, name: str) -> Definition | None:
        """Return the definition of a name, also where the module imports it from another one; None if there is none."""
        tree = self.module(module)
        found = None
        for node in ast.walk(tree) if tree is not None else ():
            match node:
                case ast.ClassDef(name=known) if known == name:
                    return self._class(module, node)
                case ast.FunctionDef(name=known) if known == name:
                    found = Definition()
                case ast.ImportFrom(names=names) if any((a.asname or a.name) == name for a in names):
                    original = next(a.name for a in names if (a.asname or a.name) == name)
                    found = self.find(self._origin(module, node), original) or found
                case ast.Assign(targets=targets) if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    found = found or Definition()
                case ast.AnnAssign(target=ast.Name(id=known)) if known == name:
                    found = found or Definition()
                case ast.Constant(value=known) if known == name:  # made by a module's `__getattr__`
                    found = found or Definition()
        return found

    def _parse(self, module: str) -> ast.Module | None:
        base = self._path.joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module from which `module` imports."""
        if not node.level:
            return node.module or ""
        is_package = self._path.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
        return ".".join([*parts, *filter(None, [node.module])])

    def _class(self, module: str, node: ast.ClassDef) -> Definition:
        """Return the members of a class and of the classes of vLLM that it inherits from."""
        found = Definition()
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id != node.name and (parent := self.find(module, base.id)):
                found.members |= parent.members
                found.required += parent.required
        for part in node.body:
            match part:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.members[name] = _parameters(part)
                    found.members |= dict.fromkeys(_attributes(part))
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    found.members[name] = None
                    if value is None and "ClassVar" not in ast.unparse(part.annotation):
                        found.required.append(name)
                case ast.Assign(targets=targets):
                    found.members |= dict.fromkeys(t.id for t in targets if isinstance(t, ast.Name))
        return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str] | None:
    """Return the names of the parameters; None if any may be passed."""
    arguments = function.args
    if arguments.kwarg is not None:
        return None
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _attributes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the attributes that a method sets on `self`."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return [node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"]
