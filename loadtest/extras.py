"""The optional packages of `pip install 'tidegate[loadtest]'`, and a check for them before a run begins.

Knows which packages a command needs. Other modules import these packages only when they use them.
"""

from importlib.util import find_spec

PLOTS = ("matplotlib",)
PROCESSES = ("psutil",)  # locust, which the extra has, installs it


class MissingExtra(Exception):
    """A package that the command needs is not installed. The message says how to install it."""


def require(packages: tuple[str, ...], purpose: str) -> None:
    """Check that all `packages` are installed. Raises `MissingExtra` if any is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{purpose} needs {' and '.join(missing)}: pip install 'tidegate[loadtest]'")
