"""/admin/keys: the API keys and projects in force, and new and revoked keys of the store.

Looking needs the role "read", and changes the role "admin". A secret is shown once, when it is made: an id is the
beginning of its digest. The shapes of created and deleted keys are those of OpenAI's administration API.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from gateway.identity import ApiKey, Holder, Project
from gateway.keys.file import ID_DIGITS, KeyringError
from gateway.keys.prices import NANO
from gateway.keys.source import KeyConflict
from gateway.protocol.bodies.validation import first_fault
from gateway.protocol.errors import ApiError, invalid_request, invalid_value
from gateway.protocol.json_body import parse_json_object
from gateway.routes.dependencies import Administrator
from gateway.routes.operators.audit import audited
from gateway.state import gateway_of
from gateway.store_keys import spender
from scheduler.store.errors import STORE_AWAY

# Fields of the keys file that a key of the store does not have: secrets, and `role: admin` as older files say it.
NOT_STORED = ("key", "sha256", "webhook", "admin")
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["name"],
                    "description": "Fields of the keys file: name, role, tiers, default_tier, project, budget, limits. "
                    "`rotate: true`, with the name alone: one more secret of the key of this name.",
                }
            }
        },
    }
}

router = APIRouter()  # for administrators


@router.get("/admin/keys")
async def read_keys(request: Request) -> dict[str, Any]:
    """Show the keys in force on this gateway, and why the file in its present state is not used, if it is not."""
    gateway = gateway_of(request)
    source, keys = gateway.key_source, gateway.keyring.keys
    spent: Sequence[Mapping[str, int]] = ()
    with suppress(*STORE_AWAY):
        spent = await gateway.usage.spent()
    projects = {key.project.name: key.project for key in keys if key.project is not None}
    return {
        "source": str(source.path) if source.path is not None else None,
        "loaded_at": source.loaded_ms // 1000,
        "problem": source.problem or None,
        "left_out": source.left_out,
        "open_access": gateway.keyring.is_open,
        "keys": [_key(key) | _created(request, key) | _budget(key, spent) for key in keys],
        "projects": [_limits(project) | _budget(project, spent) for project in projects.values()],
    }


@router.post("/admin/keys", dependencies=[Administrator], openapi_extra=BODY)
async def create_key(request: Request) -> dict[str, Any]:
    """Create an API key for all gateways of the store. Its secret is the answer's `value`, and is shown only now."""
    options = parse_json_object(await request.body())
    rotate = options.pop("rotate", False)
    if not isinstance(rotate, bool):
        raise invalid_value("rotate", "Invalid value for 'rotate': it must be true or false.")
    for name in options:
        if name in NOT_STORED:
            raise invalid_value(name, f"Invalid value for '{name}': only keys of the keys file have it.")
        if rotate and name != "name":
            raise invalid_value(name, f"Invalid value for '{name}': with 'rotate', the key keeps what it has.")
    source = gateway_of(request).key_source
    try:
        secret, key = await source.create(options, rotate=rotate)
    except ValidationError as error:
        fault = first_fault(error.errors(include_url=False))
        raise invalid_request(fault.message, fault.param, fault.code) from None
    except KeyConflict as error:
        raise _conflict(error) from None
    except KeyringError as error:
        raise invalid_value("name", f"The key is refused: {error}.") from None
    await audited(request, "key.rotate" if rotate else "key.create", f"{key.name} {_id(key)}")
    return {"object": "organization.project.api_key", **_key(key), **_created(request, key), "value": secret}


@router.delete("/admin/keys/{key_id}", dependencies=[Administrator])
async def revoke_key(request: Request, key_id: str) -> dict[str, Any]:
    """Revoke one secret of a key that was created here. Other gateways refuse it within about a second."""
    try:
        name = await gateway_of(request).key_source.revoke(key_id)
    except KeyConflict as error:
        raise _conflict(error) from None
    except LookupError:
        message = f"There is no such key in the store: {key_id[:100]}. Keys of the keys file are removed there."
        raise ApiError(404, message, param="key_id") from None
    await audited(request, "key.revoke", f"{name} {key_id}")
    return {"object": "organization.project.api_key.deleted", "id": key_id, "deleted": True}


def _conflict(error: KeyConflict) -> ApiError:
    return ApiError(409, f"Nothing was changed: {error}.", headers={"x-should-retry": "false"})


def _id(key: ApiKey) -> str:
    return key.sha256.hex()[:ID_DIGITS]


def _created(request: Request, key: ApiKey) -> dict[str, Any]:
    """Return when a key of the store was created; null for one of the file or the environment."""
    stored = gateway_of(request).key_source.stored.keys.get(_id(key))
    return {"created_at": None if stored is None else stored.created_ms // 1000}


def _key(key: ApiKey) -> dict[str, Any]:
    return _limits(key) | {
        "id": _id(key),
        "project": key.project.name if key.project is not None else None,
        "tiers": sorted(key.tiers) if key.tiers is not None else None,
        "default_tier": key.default_tier,
        "admin": key.may("admin"),
        "role": key.role,
        "files_quota_mb": key.files_quota_mb,
        "weight": key.weight,
        "batch_concurrent_lines": key.batch_concurrent_lines,
        "batch_enqueued_tokens": key.batch_enqueued_tokens,
    }


def _limits(holder: Holder) -> dict[str, Any]:
    return {
        "name": holder.name,
        "requests_per_minute": holder.requests_per_minute,
        "tokens_per_minute": holder.tokens_per_minute,
        "concurrent_requests": holder.concurrent_requests,
    }


def _budget(holder: Holder, spent: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the budget of a key or a project, and what it has spent today and this month, with open reservations.

    What is spent is null while the store does not answer.
    """
    name = spender(holder.name, isinstance(holder, Project))
    used = [{"tokens": s.get(f"{name}:tokens", 0), "cost": s.get(f"{name}:cost", 0) / NANO} for s in spent]
    budget = None if holder.budget is None else asdict(holder.budget)
    return {"budget": budget, "spent": dict(zip(("day", "month"), used, strict=True)) if used else None}
