"""A part of a job has one name for each of its choices, for all gateways, and another if its output may be another."""

from dataclasses import replace
from typing import Any

from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.placement import Placement
from scheduler.request import JobDeadline, JobPart
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.gateway.tiny_model import MODEL

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "temperature": 1, "seed": 3}


async def names(stand: Stand, part: str, **changes: Any) -> list[str]:
    """Ask for a part of a job, with `changes` to its body. Return the names of its choices."""
    before = len(stand.worker.served)
    status, _ = await ask(stand.gateway.completions, BODY | changes, JobPart(part))
    assert status == 200
    return sorted(request.job_part for request in stand.worker.served[before:])


async def ask(completions: CompletionService, body: dict[str, Any], part: JobPart | None) -> tuple[int, dict[str, Any]]:
    batch = make_tiers()["batch"]
    placement = Placement(batch, "flex", f"req_{id(body)}", part=part)
    return await completions.complete("/v1/completions", body, placement)


def be_version(stand: Stand, fingerprint: str) -> None:
    preparation = stand.gateway.completions._preparation
    preparation.model = replace(preparation.model, fingerprint=fingerprint)


async def test_whatever_may_change_the_output_changes_the_name() -> None:
    """A gateway may come back with another model, chat template, defaults or adapters."""
    async with running_stand() as stand:
        be_version(stand, "one")
        first = await names(stand, "batch_1/7/0")
        others = [await names(stand, part) for part in ("batch_1/8/0", "batch_2/7/0", "batch_1/7/1")]
        others += [
            await names(stand, "batch_1/7/0", **c) for c in ({"prompt": "ho"}, {"seed": 4}, {"temperature": 0.5})
        ]
        be_version(stand, "two")
        others.append(await names(stand, "batch_1/7/0"))
        choices = await names(stand, "batch_1/9/0", n=2)
    assert len({*first, *choices, *(name for found in others for name in found)}) == 1 + len(others) + 2


async def test_a_request_that_is_no_part_of_a_job_has_no_name_and_a_part_has_the_jobs_deadline() -> None:
    async with running_stand() as stand:
        await ask(stand.gateway.completions, dict(BODY), None)
        await ask(stand.gateway.completions, dict(BODY), JobPart("batch_1/7/0", JobDeadline(123, 45)))
        await ask(stand.gateway.completions, BODY | {"deadline_ms": 1000}, JobPart("batch_1/8/0", JobDeadline(9, 45)))
        plain, part, own = stand.worker.served
    assert (plain.job_part, plain.urgent_ms) == ("", 0)
    assert bool(part.job_part) and (part.deadline_ms, part.urgent_ms) == (123, 45)
    assert bool(own.job_part) and own.deadline_ms == own.arrival_ms + 1000
