"""The packages of `pip install 'tidegate[loadtest]'`: looked for before a run begins, not missed at its end.

Knows which command needs what; the modules that use them import them when they are used.
"""

from importlib.util import find_spec

PLOTS = ("matplotlib",)
LOCUST = ("locust", *PLOTS)
PROCESSES = ("psutil",)  # which Locust brings


class MissingExtra(Exception):
    """A package that the command cannot do without is not installed; the message says how to get it."""


def require(packages: tuple[str, ...], purpose: str) -> None:
    """Raises `MissingExtra` where one of them is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{purpose} needs {' and '.join(missing)}: pip install 'tidegate[loadtest]'")
