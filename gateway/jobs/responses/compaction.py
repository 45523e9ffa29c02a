"""POST /v1/responses/compact: a conversation as its user's messages and one item that stands for all the rest.

The model writes a summary, which the item carries. A later request sends the item back, and the model reads the summary
in its place. Nothing is stored. Knows the chat that asks for the summary, and OpenAI's form of the answer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from gateway.dialects.responses.answer import usage_object
from gateway.dialects.responses.chat import in_terms_of_responses
from gateway.dialects.responses.items import RESPONSE_PREFIX, Item, MessageItem, item_id, sealed
from gateway.dialects.responses.request import ResponseRequest
from gateway.jobs.responses.creation import chat_of, longest_that_fits
from gateway.jobs.responses.history import History
from gateway.output.piece import Piece
from gateway.requests.answers.answer import Answer, StreamEncoder
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import Usage
from gateway.requests.answers.token_report import TokenReport
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.clock import Clock

SUMMARY_SHARE = 4  # a summary has at most this part of the context
ASK = (
    "Summarise this conversation, so that you can go on with it from the summary alone. Keep facts, names, decisions, "
    "results of tools, and what is left to do. Write only the summary."
)


class NewCompaction:
    """A compaction that is being created. Call `prepare`, submit the result, and call `run` with its generation."""

    def __init__(
        self, request: ResponseRequest, completions: CompletionService, history: History, clock: Clock
    ) -> None:
        self._request = request
        self._completions = completions
        self._history = history
        self._clock = clock

    async def prepare(self, placement: Placement) -> PreparedRequest:
        """Return the chat that asks for the summary. The first turns that do not fit into the context are left out.

        Raises `ApiError` 400 or 404 if the request cannot be answered.
        """
        response_id, owner = RESPONSE_PREFIX + placement.request_id.removeprefix("req_"), placement.owner
        own = await self._history.input_of(self._request, response_id, owner)
        conversation = [*await self._history.before(self._request, owner), *own]
        limit = self._completions.limits().max_model_len // SUMMARY_SHARE
        without = dict.fromkeys(("tools", "tool_choice", "text", "include", "top_logprobs"))
        asking = self._request.model_copy(update={**without, "max_output_tokens": limit})
        ask = MessageItem(role="user", content=ASK).kept("")
        answer_as = partial(self._answer, response_id, conversation)

        async def prepare(items: list[Item]) -> PreparedRequest:
            chat = await chat_of(asking, [*items, ask])
            return await self._completions.prepare(chat, placement, answer_as)

        with in_terms_of_responses():
            return await longest_that_fits(conversation, prepare)

    def run(self, generation: Generation) -> Generation:
        return generation

    def _answer(self, response_id: str, items: list[Item], _tier: str, _report: TokenReport | None) -> Answer:
        return CompactionAnswer(response_id, self._clock.wall_ms() // 1000, items)


class CompactionAnswer:
    """A builder of `response.compaction` objects. Implements `gateway.requests.answers.answer.Answer`."""

    def __init__(self, response_id: str, created_at: int, items: Sequence[Item]) -> None:
        self._id = response_id
        self._created_at = created_at
        self._messages = [item for item in items if item.get("role") == "user"]

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        piece = choices[0][1]
        compaction = {
            "id": item_id(self._id, "compaction", 0),
            "type": "compaction",
            "encrypted_content": sealed(piece.text or piece.reasoning),
        }
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": self._created_at,
            "output": [*self._messages, compaction],
            "usage": usage_object(usage),
        }

    def chunks(self, usage_key: bool) -> StreamEncoder:
        raise NotImplementedError("a compaction is not streamed")
