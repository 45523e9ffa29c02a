"""Redis scripts that lie as .lua files beside the Python that calls them."""

from importlib import resources

from redis.asyncio import Redis
from redis.commands.core import AsyncScript


def load_script(redis: Redis, package: str, name: str) -> AsyncScript:
    """The script `<name>.lua` of `package`. redis-py sends its hash, and the text if the server does not know it."""
    return redis.register_script((resources.files(package) / f"{name}.lua").read_text(encoding="utf-8"))
