"""The items that a response answers: its own input, and the stored conversation that it continues.

Knows items and the store; does not know chat messages or tokens.
"""

import asyncio
from collections.abc import Sequence

from gateway.dialects.responses.items import (
    FIRST_INPUT,
    RESPONSE_PREFIX,
    InputItem,
    Item,
    ItemReference,
    item_id,
)
from gateway.dialects.responses.request import ResponseRequest
from gateway.jobs.responses.store import NoConversation, ResponseStore
from gateway.protocol.errors import ApiError, invalid_request, invalid_value

MAX_BYTES = 16 * 2**20  # of the stored items that a response continues; as much as a body may have by default
MANY_ITEMS = 256  # items that take several ms; more are worked on in a thread
NOT_STORED = "This server stores no responses. Send the whole conversation as 'input' instead."


class History:
    """A reader of conversations. `store` is None if this server stores no responses."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def before(self, request: ResponseRequest, owner: str | None) -> list[Item]:
        """Return the items that come before those of `request`: of earlier responses, or of its conversation.

        Raises `ApiError` 400 if there are none.
        """
        previous, param = request.previous_response_id, "previous_response_id"
        if request.conversation is not None:
            previous, param = request.conversation.id, "conversation"
        if previous is None:
            return []
        if self._store is None:
            raise invalid_value(param, NOT_STORED)
        if previous.startswith(RESPONSE_PREFIX) != (param == "previous_response_id"):
            raise _not_found(param, previous)
        found = await self._store.conversation(previous, owner, MAX_BYTES)
        match found:
            case NoConversation("missing", missing):
                raise _not_found(param, missing)
            case NoConversation("running", running):
                raise invalid_value(param, f"The response '{running}' has not ended yet. Wait for it, or cancel it.")
            case NoConversation():
                message = f"This conversation is larger than {MAX_BYTES} bytes. Begin a new one with 'input'."
                raise invalid_request(message, param, "context_length_exceeded")
            case _:
                return found

    async def input_of(self, request: ResponseRequest, response_id: str, owner: str | None) -> list[Item]:
        """Return the items of the input, as `kept` does."""
        return await self.kept(request.items, response_id, owner)

    async def kept(self, given: Sequence[InputItem], record_id: str, owner: str | None) -> list[Item]:
        """Return the items of a body with ids, which are made of `record_id`.

        Each reference is replaced by the item to which it refers. Raises `ApiError` 404 if there is no such item.
        """
        referred = await self._referred([item.id for item in given if isinstance(item, ItemReference)], owner)

        def kept() -> list[Item]:
            return [
                referred[item.id]
                if isinstance(item, ItemReference)
                else item.kept(item_id(record_id, item.type, FIRST_INPUT + number))
                for number, item in enumerate(given)
            ]

        return await asyncio.to_thread(kept) if len(given) > MANY_ITEMS else kept()

    async def _referred(self, ids: list[str], owner: str | None) -> dict[str, Item]:
        if not ids:
            return {}
        if self._store is None:
            raise invalid_value("input", NOT_STORED)
        found = await self._store.items(ids, owner, MAX_BYTES)
        if isinstance(found, NoConversation):
            message = (
                f"The responses of the referred items are larger than {MAX_BYTES} bytes. Send the items themselves."
            )
            raise invalid_request(message, "input", "context_length_exceeded")
        missing = next((item for item in ids if item not in found), None)
        if missing is not None:
            message = f"Item with id '{missing[:200]}' not found. Items are kept only of responses that are stored."
            raise ApiError(404, message, param="input")
        return found


def _not_found(param: str, missing: str) -> ApiError:
    if param == "conversation":
        return ApiError(404, f"Conversation with id '{missing[:200]}' not found.", param=param)
    message = f"Previous response with id '{missing[:200]}' not found."
    return invalid_request(message, param, "previous_response_not_found")


def turns_of(items: Sequence[Item]) -> list[int]:
    """Return the index of the first item of each turn. A turn begins with a message of the user."""
    begins = (i for i, item in enumerate(items) if item["type"] == "message" and item["role"] == "user")
    return [0, *(i for i in begins if i > 0)]


def without_turns_before(items: Sequence[Item], start: int) -> list[Item]:
    """Return the items from index `start` on, and the system and developer messages before it."""
    return [item for item in items[:start] if item.get("role") in ("system", "developer")] + [*items[start:]]
