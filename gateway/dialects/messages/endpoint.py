"""Answer a request of /v1/messages: as a chat, in Anthropic's words.

Knows the completion service; does not know HTTP. The same answers a line of a batch.
"""

from dataclasses import dataclass
from functools import partial

from gateway.dialects.messages.answer import MESSAGE_PREFIX, MessageAnswer, MessageHead
from gateway.dialects.messages.chat import chat_to_answer, in_terms_of_messages
from gateway.protocol.bodies.schemas import ChatCompletionRequest
from gateway.protocol.errors import model_not_found
from gateway.requests.answers.answer import Answer
from gateway.requests.answers.token_report import TokenReport
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.service import ONLINE, CompletionService, Endpoint
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.config import Tier

MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message that is being created, from the chat that answers it."""

    completions: CompletionService
    chat: ChatCompletionRequest

    async def prepare(self, placement: Placement) -> PreparedRequest:
        with in_terms_of_messages():
            return await self.completions.prepare(self.chat, placement, partial(self._answer, placement))

    def run(self, generation: Generation) -> Generation:
        return generation

    def _answer(self, placement: Placement, service_tier: str, report: TokenReport | None) -> Answer:
        message_id = MESSAGE_PREFIX + placement.request_id.removeprefix("req_")
        tier = "batch" if placement.part is not None else service_tier
        return MessageAnswer(MessageHead(message_id, self.chat.model, tier, self.chat.output_limit))


def add_messages(completions: CompletionService) -> None:
    """Let `completions` answer requests of /v1/messages, of HTTP clients and of batches."""
    completions.endpoints[MESSAGES] = Endpoint(chat_to_answer, partial(NewMessage, completions), ONLINE)


async def count_tokens(
    completions: CompletionService, chat: ChatCompletionRequest, tier: Tier, owner: str | None
) -> int:
    """Return how many tokens the prompt of `chat` has. Raises the `ApiError` 400 and 404 of `NewMessage.prepare`."""
    with in_terms_of_messages():
        if chat.model not in completions.model.names:
            raise model_not_found(chat.model)
        return len(await completions.encode(chat, tier, owner))
