"""The /admin/dead-letters endpoints: requests that were given up because their workers died.

They need the role "read", and changes the role "operate". They never show a prompt.
"""

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from gateway.dead_letters import DeadLetter
from gateway.jobs.batches.retry import retry_line
from gateway.jobs.batches.service import InputProblem
from gateway.protocol.errors import ApiError, invalid_value
from gateway.routes.dependencies import Operator
from gateway.routes.operators.audit import audited
from gateway.state import gateway_of

router = APIRouter()  # for administrators


@router.get("/admin/dead-letters")
async def list_dead_letters(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> dict[str, Any]:
    """List the dead letters of all keys, the newest first."""
    found = await gateway_of(request).dead_letters.page(limit + 1, after)
    if found is None:
        raise invalid_value("after", "Invalid value for 'after': there is no such dead letter.")
    return {"object": "list", "data": [_object(letter) for letter in found[:limit]], "has_more": len(found) > limit}


@router.post("/admin/dead-letters/{letter_id}/retry", status_code=202, dependencies=[Operator])
async def retry_dead_letter(request: Request, letter_id: str) -> JSONResponse:
    """Create a batch of the same owner for the line, and remove the dead letter. The answer names the batch."""
    letters, gateway = gateway_of(request).dead_letters, gateway_of(request)
    letter = await letters.get(letter_id)
    if letter is None:
        raise _unknown(letter_id)
    if letter.batch_id is None or letter.line is None:
        raise _cannot_retry("Only lines of batches can be retried. The client must send this request again.")
    new_id = hashlib.sha256(letter.id.encode()).hexdigest()[:24]  # so that a repetition creates no second batch
    created = await retry_line(gateway.batches, gateway.files, letter.batch_id, letter.line, letter.owner, new_id)
    if isinstance(created, InputProblem):
        raise _cannot_retry(created.message)
    await letters.remove(letter.id)
    await audited(request, "dead_letter.retry", letter.id)
    return JSONResponse({**_object(letter), "retry_batch_id": created.id}, status_code=202)


@router.delete("/admin/dead-letters/{letter_id}", dependencies=[Operator])
async def delete_dead_letter(request: Request, letter_id: str) -> dict[str, Any]:
    """Remove a dead letter."""
    if not await gateway_of(request).dead_letters.remove(letter_id):
        raise _unknown(letter_id)
    await audited(request, "dead_letter.delete", letter_id)
    return {"id": letter_id, "object": "dead_letter", "deleted": True}


def _object(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "object": "dead_letter",
        "tier": letter.tier,
        "owner": letter.owner,
        "batch_id": letter.batch_id,
        "custom_id": letter.custom_id,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "died_at": letter.at_ms // 1000,
    }


def _unknown(letter_id: str) -> ApiError:
    return ApiError(404, f"No dead letter found with id '{letter_id[:200]}'.", param="letter_id")


def _cannot_retry(message: str) -> ApiError:
    return ApiError(409, message, code="cannot_retry", headers={"x-should-retry": "false"})
