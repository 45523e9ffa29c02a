"""The one loader of Redis scripts, which are .lua files next to the Python modules that call them."""

from functools import cache
from importlib import resources

from redis.asyncio import Redis
from redis.commands.core import AsyncScript


def load_script(client: Redis, package: str, *names: str, prelude: str = "") -> AsyncScript:
    """Return one script made of `prelude` and the files `<name>.lua` of `package`, in this order.

    redis-py sends the script's hash, and its text if the server does not know the hash yet.
    """
    return client.register_script("\n".join((prelude, *(script_text(package, name) for name in names))))


@cache
def script_text(package: str, name: str) -> str:
    """Return the text of the file `<name>.lua` of `package`."""
    return (resources.files(package) / f"{name}.lua").read_text(encoding="utf-8")
