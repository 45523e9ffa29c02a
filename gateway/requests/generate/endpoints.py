"""How the endpoints that generate something read a body and answer it, so that all have one way through the gateway."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.http.sse import Write
from gateway.requests.generate.generation import Generation
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.config import Tier


class Deliverable(Protocol):
    """An answer that is being generated. Only one of its methods is called, and only once."""

    @property
    def tier(self) -> Tier: ...

    async def respond(self) -> dict[str, Any]: ...

    async def stream(self, write: Write) -> None: ...


class NewAnswer(Protocol):
    """An answer to a body. Call `prepare`, submit the result, and call `run` with its generation."""

    async def prepare(self, placement: Placement) -> PreparedRequest: ...

    def run(self, generation: Generation) -> Deliverable: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint. `parse` makes a request of a body, and is picklable; `new` makes an answer of the request.

    `online` has the options that need a connection to the client, with what a job is told that uses them.
    """

    parse: Callable[[dict[str, Any]], Any]
    new: Callable[[Any], NewAnswer]
    online: Mapping[str, str] = field(default_factory=dict)
