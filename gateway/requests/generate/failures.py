"""The errors with which a generation ends that was accepted, and what is kept of a request that was given up."""

import structlog

from engine.interface import GRAMMAR_FAILED
from gateway.dead_letters import DeadLetter
from gateway.protocol.errors import ApiError, given_up, internal_error, invalid_request, unavailable
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.request import ANSWER_TOO_LARGE, GIVEN_UP, UPSTREAM_REFUSED, EventKind, TokenEvent

log = structlog.get_logger(__name__)


def failure_of(event: TokenEvent, *, has_grammar: bool) -> ApiError | None:
    """Return the error that an event means for the client; None if the generation goes on, or has ended well."""
    match event.kind:
        case EventKind.FAILED:
            return _failed(event, has_grammar)
        case EventKind.UNAVAILABLE:
            return unavailable(event.error)
        case EventKind.CANCELLED:
            message = "The server cancelled the request."
            return ApiError(503, message, "server_error", code="server_overloaded")
    return None


def _failed(event: TokenEvent, has_grammar: bool) -> ApiError:
    if has_grammar and (event.error or "").startswith(GRAMMAR_FAILED):
        return invalid_request(f"The output cannot have the requested format: {event.error}.")
    if event.code in GIVEN_UP:
        return given_up(event.error, event.code)
    if event.code in (UPSTREAM_REFUSED, ANSWER_TOO_LARGE):
        return invalid_request(event.error, code=event.code)
    log.warning("generation_failed", sequence=event.request_id, reason=event.error)
    return internal_error("The generation was interrupted by an error of the server.")


def dead_letter_of(prepared: PreparedRequest, reason: str, now_ms: int) -> DeadLetter:
    request_id = prepared.requests[0].id.rpartition("-")[0]
    attempts = prepared.tier.retry.max_attempts
    return DeadLetter(request_id, prepared.tier.name, attempts, reason, now_ms, prepared.owner)
