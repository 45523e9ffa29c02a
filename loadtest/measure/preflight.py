"""The requests before a measurement: whether each class gets an answer, and which fields the server knows.

They also warm the server up. A server that cannot be measured is told from one that is slow before any load is sent.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from loadtest.client.answer import Outcome
from loadtest.client.http import HINTS, Target, TargetError, send
from loadtest.client.runner import request_for
from loadtest.traffic.scenario import TrafficClass
from loadtest.traffic.workload import PlannedRequest

TIMEOUT_S = 120.0  # seconds for one answer; a server may load its model at the first request
BUSY = (429, 503)  # a server that refuses for now can be measured
UNKNOWN_FIELD, NO_ACCESS = (400, 422), (401, 403)
# Fields beyond OpenAI's API are left out step by step, if the server refuses them.
FEWER_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": None, "stream_options": {"include_usage": True}},
    {"ignore_eos": None, "stream_options": None},
)


async def checked(target: Target, classes: Sequence[TrafficClass], seed: int) -> tuple[TrafficClass, ...]:
    """Return the classes with the fields that the server accepts. Raises `TargetError` if a class gets an error."""
    return tuple([await _checked(target, traffic, seed) for traffic in classes])


async def _checked(target: Target, traffic: TrafficClass, seed: int) -> TrafficClass:
    refused: Outcome | None = None
    for fields in FEWER_FIELDS:
        tried = traffic.model_copy(update={"extra_body": {**fields, **traffic.extra_body}})
        outcome = await _ask(target, tried, seed)
        if outcome.error is None or outcome.status in BUSY:
            return tried
        refused = refused or outcome
        if outcome.status not in UNKNOWN_FIELD:
            break
    assert refused is not None, "without an error the loop returns"
    raise TargetError(f"{target}, {traffic.name}: {_explanation(refused, traffic)}")


async def _ask(target: Target, traffic: TrafficClass, seed: int) -> Outcome:
    planned = PlannedRequest(traffic.name, 0, 0.0, traffic.prompt_tokens.min, 2, seed)
    path, body = request_for(target, traffic, planned)
    outcome = Outcome(traffic.name, 0, due_s=perf_counter())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await send(target, path, body, outcome, traffic.stream)
    except TimeoutError:
        return replace(outcome, error=f"no answer within {TIMEOUT_S:.0f} s")
    return outcome


def _explanation(outcome: Outcome, traffic: TrafficClass) -> str:
    if outcome.status == 200 and traffic.stream and not outcome.progress:
        return f"{outcome.error}: the server does not stream; --no-stream measures whole answers"
    status = f"HTTP {outcome.status}: " if outcome.status not in (0, 200) else ""
    hint = HINTS[outcome.status] if outcome.status in NO_ACCESS else ""
    return f"{status}{outcome.error}{hint}"
