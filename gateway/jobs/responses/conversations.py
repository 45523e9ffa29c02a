"""The conversations of /v1/conversations: lists of items that responses read, and to which they add.

A conversation is a record of the store of responses, with its items as the input. So it expires, is counted and belongs
to a key as a response does. Knows items and records; does not know HTTP.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gateway.dialects.responses.items import InputItem, Item
from gateway.jobs.responses.history import MAX_BYTES, NOT_STORED, History
from gateway.jobs.responses.store import NoRoom, ResponseStore, StoredResponse
from gateway.protocol.errors import ApiError, invalid_request, invalid_value, too_many_responses
from scheduler.clock import Clock

PREFIX = "conv_"
_FIELDS = ("id", "object", "created_at", "metadata")

Change = Callable[[StoredResponse], StoredResponse]


class Conversations:
    """All conversations. `store` is None if this server stores no responses: then there are none."""

    def __init__(self, store: ResponseStore | None, history: History, clock: Clock) -> None:
        self._store = store
        self._history = history
        self._clock = clock

    async def create(self, items: Sequence[InputItem], metadata: dict[str, str], owner: str | None) -> dict[str, Any]:
        """Store a new conversation. Raises `ApiError` 400 if this server stores none, and 503 if there is no room."""
        if self._store is None:
            raise invalid_value("store", NOT_STORED)
        conversation = {
            "id": PREFIX + secrets.token_hex(16),
            "object": "conversation",
            "created_at": self._clock.wall_ms() // 1000,
            "metadata": metadata,
        }
        record = {**conversation, "status": "completed", "output": [], "previous_response_id": None}
        try:
            await self._store.create(record, await self._kept(items, owner), owner)
        except NoRoom:
            raise too_many_responses() from None
        return conversation

    async def get(self, conversation_id: str, owner: str | None) -> dict[str, Any]:
        """Return the conversation. Raises `ApiError` 404 if `owner` has no such conversation, as all methods do."""
        return _conversation(await self._found(conversation_id, owner))

    async def items(self, conversation_id: str, owner: str | None) -> list[Item]:
        """Return the items of a conversation, the oldest first."""
        return (await self._found(conversation_id, owner)).input

    async def update(self, conversation_id: str, metadata: dict[str, str], owner: str | None) -> dict[str, Any]:
        def change(found: StoredResponse) -> StoredResponse:
            return replace(found, response=found.response | {"metadata": metadata})

        return _conversation(await self._change(conversation_id, owner, change))

    async def delete(self, conversation_id: str, owner: str | None) -> None:
        await self._found(conversation_id, owner)
        assert self._store is not None
        await self._store.delete(conversation_id, owner)

    async def add(self, conversation_id: str, given: Sequence[InputItem], owner: str | None) -> list[Item]:
        """Add the items of a body. Return them as they are kept."""
        items = await self._kept(given, owner)
        await self.append(conversation_id, items, owner)
        return items

    async def append(self, conversation_id: str, items: Sequence[Item], owner: str | None) -> None:
        """Add items that have ids. Does nothing if the last of them is there already: a call may be repeated.

        Raises `ApiError` 400 if the conversation would be larger than a response can read.
        """

        def change(found: StoredResponse) -> StoredResponse:
            is_there = bool(items) and any(item["id"] == items[-1]["id"] for item in found.input)
            return found if is_there else replace(found, input=[*found.input, *items])

        await self._change(conversation_id, owner, change)

    async def remove(self, conversation_id: str, item: str, owner: str | None) -> dict[str, Any]:
        """Remove an item. Return the conversation. Raises `ApiError` 404 if there is no such item."""

        def change(found: StoredResponse) -> StoredResponse:
            left = [kept for kept in found.input if kept["id"] != item]
            if len(left) == len(found.input):
                raise no_such_item(item)
            return replace(found, input=left)

        return _conversation(await self._change(conversation_id, owner, change))

    async def _kept(self, given: Sequence[InputItem], owner: str | None) -> list[Item]:
        return await self._history.kept(given, secrets.token_hex(16), owner)

    async def _found(self, conversation_id: str, owner: str | None) -> StoredResponse:
        found = None
        if self._store is not None and conversation_id.startswith(PREFIX):
            found = await self._store.get(conversation_id, owner)
        if found is None:
            raise no_such_conversation(conversation_id)
        return found

    async def _change(self, conversation_id: str, owner: str | None, change: Change) -> StoredResponse:
        """Change a conversation. If somebody else changes it meanwhile, the change is made anew on what is there."""
        while True:
            found = await self._found(conversation_id, owner)
            changed = change(found)
            assert self._store is not None
            try:
                if changed is found or await self._store.replace(changed, owner, MAX_BYTES):
                    return changed
            except NoRoom:
                message = f"This conversation would be larger than {MAX_BYTES} bytes, or than the room for all of them."
                raise invalid_request(message, "items", "context_length_exceeded") from None


def no_such_conversation(conversation_id: str) -> ApiError:
    return ApiError(404, f"Conversation with id '{conversation_id[:200]}' not found.", param="conversation_id")


def no_such_item(item: str) -> ApiError:
    return ApiError(404, f"Item with id '{item[:200]}' not found in this conversation.", param="item_id")


def _conversation(found: StoredResponse) -> dict[str, Any]:
    return {name: found.response[name] for name in _FIELDS}
