"""Turn every failure into OpenAI's error object, with the HTTP status and the headers that clients react to.

Knows HTTP statuses, OpenAI's error codes and the reasons for which admission rejects a request. Does not know routes or
bodies. The text of an unexpected exception never becomes part of an answer.
"""

import math
from collections.abc import Mapping
from typing import Any

from engine.interface import ModelKind
from gateway.files.storage import StorageUnreachable
from scheduler.client.rejection import RESTART_S, Rejected, RejectReason
from scheduler.config import Tier
from scheduler.store.errors import StoreRefused

MAX_RETRY_AFTER_S = 120  # seconds; the openai client does not retry if it is told to wait longer


class ApiError(Exception):
    """An error that is sent to the client. `param` is the path of the wrong parameter, such as `messages[0].role`."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[type["ApiError"], tuple[Any, ...]]:
        """Return how to make a copy in another process, where large bodies are parsed."""
        return ApiError, (self.status, self.message, self.type, self.param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object. All four keys are always present."""
        fault = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fault}


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid_value(param: str, message: str) -> ApiError:
    return invalid_request(message, param, "invalid_value")


def unsupported_parameter(param: str) -> ApiError:
    message = f"Unsupported parameter: '{param}' is not supported by this server with this value."
    return invalid_request(message, param, "unsupported_parameter")


def misplaced_parameter(param: str, endpoint: str) -> ApiError:
    message = f"Unsupported parameter: '{param}' is a parameter of {endpoint} only."
    return invalid_request(message, param, "unsupported_parameter")


# By the kind of a model: what it does, its endpoint, and its name among the capabilities of GET /v1/models.
KINDS: dict[ModelKind, tuple[str, str, str]] = {
    "chat": ("generates text", "/v1/chat/completions", "completion"),
    "embedding": ("makes embeddings", "/v1/embeddings", "embedding"),
    "rerank": ("ranks documents", "/v1/rerank", "rerank"),
}


def wrong_kind(model: str, kind: ModelKind, wanted: ModelKind) -> ApiError:
    """Return the error for a request of an endpoint that models of the kind `wanted` answer, and `model` does not."""
    does, path, _ = KINDS[kind]
    message = (
        f"The model '{model}' {does}: send it POST {path}. For this endpoint, name a model that has "
        f"'{KINDS[wanted][2]}' among its capabilities in GET /v1/models."
    )
    return invalid_request(message, "model", "wrong_model_kind")


def invalid_json(*, has_half_pair: bool = False) -> ApiError:
    message = "The body is not valid JSON in UTF-8."
    if has_half_pair:
        message = "The body has half of a surrogate pair, such as a \\ud83d alone: a text was cut within a character."
    return invalid_request(message, code="invalid_json")


def compressed_body(encoding: str) -> ApiError:
    return ApiError(415, f"Bodies with the Content-Encoding '{encoding}' are not read here: send it as it is.")


class ContextLengthExceeded(ApiError):
    """The prompt does not fit into the context. `num_tokens` is None if the prompt is too long to be counted."""

    num_tokens: int | None = None
    limit: int = 0


def context_length_exceeded(limit: int, param: str, prompt: int | None, output: int | None) -> ApiError:
    """Return the error for a prompt that does not fit into the model's context of `limit` tokens.

    `prompt` is the number of tokens of the prompt; None if the prompt is too long to be counted. `output` is the number
    of output tokens that the client requested; None if the client did not request a number.
    """
    counted = "more than that" if prompt is None else f"{prompt} tokens"
    if prompt is not None and output is not None and prompt < limit:
        message = (
            f"This model's maximum context length is {limit} tokens. The prompt has {prompt}, so '{param}' must be at "
            f"most {limit - prompt}, not {output}."
        )
        return invalid_request(message, param, "context_length_exceeded")
    requested = "" if output is None else f" and {output} more for the completion"
    message = f"This model's maximum context length is {limit} tokens, but the prompt has {counted}{requested}."
    error = ContextLengthExceeded(400, message, param=param, code="context_length_exceeded")
    error.num_tokens, error.limit = prompt, limit
    return error


def invalid_api_key() -> ApiError:
    message = "Incorrect API key provided."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def foreign_origin(origin: str, *, with_session: bool = False) -> ApiError:
    """Return the error for a page of another origin. Whatever is allowed, it may not use the session of the console."""
    message = (
        f"Web pages of the origin {origin[:200]} may not use this server. To allow them, start it with "
        f"`--allowed-origins {origin[:200]}`, or set TIDEGATE_ALLOWED_ORIGINS."
    )
    if with_session:
        message = f"Web pages of the origin {origin[:200]} may not use the console's session: they need an API key."
    return ApiError(403, message, code="origin_not_allowed")


def host_not_allowed(host: str) -> ApiError:
    message = (
        f"This server may not be called by the host name {host[:100]!r} while it asks for no API key. "
        "Configure API keys (--api-keys), or name the host (--allowed-hosts)."
    )
    return ApiError(403, message, code="host_not_allowed")


def model_not_found(model: str) -> ApiError:
    message = f"The model `{model[:200]}` does not exist or you do not have access to it."
    return ApiError(404, message, param="model", code="model_not_found")


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.")


def disk_full() -> ApiError:
    """Return the error for a file or a batch that would take the disk's reserve. A retry would not help soon."""
    message = (
        "The server's disk has no space for this. Delete files that are not needed any more "
        "(DELETE /v1/files/{file_id}); if that is refused as well, only the operator can make room."
    )
    return ApiError(507, message, "server_error", code="insufficient_storage", headers={"x-should-retry": "false"})


def files_quota_exceeded(used_bytes: int, quota_bytes: int) -> ApiError:
    message = (
        f"The files of this API key may have {quota_bytes / 2**20:.0f} MB, and its other files and pending uploads "
        f"have {used_bytes / 2**20:.1f} MB. Delete some (DELETE /v1/files/{{file_id}}), or let them expire "
        "(`expires_after`)."
    )
    return ApiError(413, message, param="file", code="files_quota_exceeded")


def task_quota_exceeded(held: int, limit: int) -> ApiError:
    message = (
        f"The waiting and running tasks of an API key may have {limit / 2**20:.0f} MB, and yours have "
        f"{held / 2**20:.1f} MB. Try again when some have ended, or send smaller ones."
    )
    return ApiError(429, message, "requests", code="rate_limit_exceeded", headers=retry_after(5.0))


def timed_out(tier: str) -> ApiError:
    """Return the error for a request that exceeded its tier's timeout.

    Its headers tell the client not to retry, because a retry would begin at the end of the same queue.
    """
    message = f"The request got no answer within the {tier} tier's timeout."
    return ApiError(504, message, "timeout", code="timeout", headers={"x-should-retry": "false"})


def internal_error(message: str = "The server had an error while processing your request.") -> ApiError:
    return ApiError(500, message, "server_error")


def given_up(message: str, code: str) -> ApiError:
    """Return the error for a request that was given up: its worker died in each attempt at it, or cannot read it.

    Its headers tell the client not to retry, because a retry would probably end further workers.
    """
    return ApiError(500, message, "server_error", code=code, headers={"x-should-retry": "false"})


def too_many_bodies() -> ApiError:
    message = "The server is receiving too many large bodies at the moment."
    return ApiError(503, message, "server_error", code="server_overloaded", headers=retry_after(2.0))


def too_many_open_bytes() -> ApiError:
    message = "Your open requests have too many bytes together. Try again when one of them has ended."
    return ApiError(429, message, "requests", code="rate_limit_exceeded", headers=retry_after(1.0))


def slow_body() -> ApiError:
    message = "The body came too slowly while the server has many others. Please send it again soon."
    return ApiError(408, message, "timeout", code="timeout", headers=retry_after(5.0))


def too_many_followers(count: int) -> ApiError:
    message = (
        f"You follow {count} background responses that are still generated, and this server serves no more followers "
        "at the moment. Please poll the response without 'stream', or follow it later."
    )
    return ApiError(429, message, "requests", code="rate_limit_exceeded", headers=retry_after(5.0))


def too_many_responses() -> ApiError:
    message = "There is no room for another background response at the moment. Please try again soon."
    return ApiError(503, message, "server_error", code="server_overloaded", headers=retry_after(5.0))


def too_many_downloads() -> ApiError:
    message = "Too many files are being downloaded at the moment. Please try again soon."
    return ApiError(503, message, "server_error", code="server_overloaded", headers=retry_after(5.0))


def store_failed(error: Exception | None = None) -> ApiError:
    """Return the error for a request that needs the store, or the file storage, while it is away or takes no writes."""
    message = "The server's store is not reachable at the moment."
    if isinstance(error, StoreRefused):
        message = f"The server's store refuses writes at the moment: {error.cause}."
    elif isinstance(error, StorageUnreachable):
        message = "The server's file storage is not reachable at the moment."
    return ApiError(503, message, "server_error", code="server_overloaded", headers=retry_after(5.0))


def unavailable(message: str) -> ApiError:
    """Return the error for an accepted request that the server gave up, for example at its end. A retry may succeed."""
    return ApiError(503, message, "server_error", code="server_overloaded", headers=retry_after(RESTART_S))


def rejected(reason: Rejected, tier: Tier, patient: str | None = None) -> ApiError:
    """Return the error for a request that admission rejected.

    The status is 503 if the server cannot serve the tier at the moment. It is 429 where the key's own requests are in
    the way, and in a bulk tier if its queue is full or the request's deadline is too near. `patient` is the
    `service_tier` of a tier in which the caller's requests wait longer instead of being rejected; None if there is no
    such tier.
    """
    headers = retry_after(reason.retry_after_s) | ({"x-should-retry": "false"} if reason.is_final else {})
    is_crowded = reason.reason in (RejectReason.OVERLOADED, RejectReason.QUEUE_FULL, RejectReason.KEY_LIMIT)
    way_out = f'With `"service_tier": "{patient}"` it would wait its turn.' if patient and is_crowded else ""
    message = " ".join(filter(None, (reason.message, way_out, reason.advice)))
    if reason.reason in (RejectReason.DRAINING, RejectReason.OVERLOADED, RejectReason.TIER_GONE):
        return ApiError(503, message, "server_error", code="server_overloaded", headers=headers)
    if reason.reason is RejectReason.KEY_LIMIT:
        return ApiError(429, message, "requests", code="rate_limit_exceeded", headers=headers)
    if reason.reason is RejectReason.NO_ENGINE:
        return ApiError(503, message, "server_error", code="engine_overloaded", headers=headers)
    if tier.is_interactive:
        return ApiError(503, message, "server_error", code="server_overloaded", headers=headers)
    return ApiError(429, message, "resource_unavailable", code="resource_unavailable", headers=headers)


def retry_after(seconds: float) -> dict[str, str]:
    """Return the headers `retry-after` (in whole seconds) and `retry-after-ms`, which the openai client reads first."""
    seconds = min(float(MAX_RETRY_AFTER_S), max(0.001, seconds))
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}
