"""Refuses sampling parameters that the workers cannot honour.

Workers say in their heartbeats what their engines cannot do; most engines can do everything. Any worker may claim a
request, so a parameter must be known to all of them.
"""

from collections.abc import Iterable

from engine.interface import options_of
from gateway.protocol.errors import invalid_value
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import Request

# Parameters of bodies that become sampling parameters of other names.
_PARAMS = {"grammar": "response_format", "json_schema": "response_format"}


def check_supported(requests: Iterable[Request], workers: Iterable[WorkerStatus]) -> None:
    """Raise `ApiError` 400 if a request has a parameter that a live worker cannot honour."""
    unsupported = frozenset[str]().union(*(worker.unsupported for worker in workers))
    if not unsupported:
        return
    for request in requests:
        for name in sorted(options_of(request.sampling) & unsupported):
            param = _PARAMS.get(name, name)
            what = {"grammar": "a grammar that is no JSON schema", "json_schema": "a JSON schema"}.get(name, "it")
            reason = f"the server that generates the tokens cannot do {what}. Leave it out."
            raise invalid_value(param, f"Invalid value for '{param}': {reason}")
