"""The one loader of Redis scripts, which are .lua files next to the Python modules that call them."""

from importlib import resources

from redis.asyncio import Redis
from redis.commands.core import AsyncScript


def load_script(client: Redis, package: str, *names: str, prelude: str = "") -> AsyncScript:
    """Return one script made of `prelude` and the files `<name>.lua` of `package`, in this order.

    redis-py sends the script's hash, and its text if the server does not know the hash yet.
    """
    folder = resources.files(package)
    texts = ((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    return client.register_script("\n".join((prelude, *texts)))
