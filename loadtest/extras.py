"""The packages of `pip install 'tidegate[loadtest]'`: looked for before a run begins.

Knows which command needs which packages; the modules that use them import them when they are used.
"""

from importlib.util import find_spec

PLOTS = ("matplotlib",)
LOCUST = ("locust", *PLOTS)
PROCESSES = ("psutil",)  # installed with Locust


class MissingExtra(Exception):
    """A package that the command needs is not installed; the message says how to install it."""


def require(packages: tuple[str, ...], purpose: str) -> None:
    """Check that all packages are installed. Raises `MissingExtra`."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{purpose} needs {' and '.join(missing)}: pip install 'tidegate[loadtest]'")
