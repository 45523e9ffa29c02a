"""The arms of the comparisons over HTTP: a server, and the service tier that an arm's requests ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.client.http import Target, TargetError
from loadtest.serving import Server

DEFAULT, FLEX, VLLM = "default", "flex", "vllm"
OUR_ARMS = (DEFAULT, FLEX)
ARMS = (*OUR_ARMS, VLLM)


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of a comparison, which share one machine. A server that no arm needs is None."""

    ours: Server | None
    vllm: Server | None

    @property
    def all(self) -> list[Server]:
        return [server for server in (self.ours, self.vllm) if server is not None]

    def of(self, arm: str) -> Server:
        server = self.vllm if arm == VLLM else self.ours
        assert server is not None, "a server is started for each arm"
        return server

    def target(self, arm: str) -> Target:
        return self.of(arm).target

    def others(self, arm: str) -> list[Server]:
        """Return the servers that must be idle while `arm` is measured."""
        return [server for server in self.all if server is not self.of(arm)]


def service_tier(arm: str) -> str | None:
    """Return the value of `service_tier` in the arm's requests; None: they do not have this field."""
    return None if arm == VLLM else arm


def parse_arms(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `default,vllm`. Raises `TargetError` for an unknown arm."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in ARMS]:
        raise TargetError(f"there is no arm {unknown[0]}: {', '.join(ARMS)} are known")
    if not names:
        raise TargetError(f"no arm was given: {', '.join(ARMS)} are known")
    return names


def ours_of(arms: Sequence[str]) -> list[str]:
    return [arm for arm in arms if arm in OUR_ARMS]
