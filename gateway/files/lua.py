"""Load Redis scripts. Each script is a .lua file in the same package as the Python code that calls it."""

from importlib import resources

from redis.asyncio import Redis
from redis.commands.core import AsyncScript


def load_script(redis: Redis, package: str, name: str) -> AsyncScript:
    """Return the script `<name>.lua` of `package`.

    For each call, redis-py sends the hash of the script. It sends the whole text if the server does not know the hash.
    """
    return redis.register_script((resources.files(package) / f"{name}.lua").read_text(encoding="utf-8"))
