"""The tokens of an answer in OpenAI's two formats of log probabilities, and in vLLM's format for those of the prompt.

What is reported of a token becomes JSON at once: an answer may have a hundred thousand log probabilities, and to write
them all in one step would stop everything else.

Knows the formats and the texts of tokens; does not know how tokens are generated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.interface import TokenLogprobs
from gateway.output.piece import ReportedToken
from gateway.requests.tokens.token_text import TokenTexts, shown


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What an answer reports of its tokens."""

    texts: TokenTexts
    num_logprobs: int | None = None  # likeliest tokens reported at each position; None: no log probabilities
    num_prompt_logprobs: int | None = None  # as `num_logprobs`, for the prompt and in vLLM's format
    as_ids: bool = False  # write tokens as `token_id:5` instead of their text
    with_ids: bool = False  # report the ids of prompt and output

    def chat_logprobs(self, tokens: Iterable[ReportedToken]) -> dict[str, Any] | None:
        """Return the `logprobs` of a chat's choice; None if they were not requested."""
        if self.num_logprobs is None:
            return None
        return {"content": [self._chat_entry(t.logprobs) for t in tokens if t.logprobs is not None], "refusal": None}

    def text_logprobs(self, tokens: Sequence[ReportedToken]) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice of /v1/completions; None if they were not requested."""
        if self.num_logprobs is None:
            return None
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [None if token.logprobs is None else token.logprobs.logprob for token in tokens],
            "top_logprobs": [None if token.logprobs is None else self._top(token.logprobs) for token in tokens],
            "text_offset": [token.text_offset for token in tokens],
        }

    def prompt_logprobs(self, prompt: Sequence[TokenLogprobs]) -> list[msgspec.Raw | None] | None:
        """Return vLLM's `prompt_logprobs`; None if they were not requested.

        For each token of the prompt, they map the ids of this token and of the likeliest ones to their log
        probabilities. The first token has none. A rank is null if the token is not among the likeliest ones.
        """
        if self.num_prompt_logprobs is None:
            return None
        return [None, *(self._prompt_entry(found, self.num_prompt_logprobs) for found in prompt)]

    def _chat_entry(self, found: TokenLogprobs) -> msgspec.Raw:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in found.top[: self.num_logprobs]]
        return _json(self._chat_token(found.token_id, found.logprob) | {"top_logprobs": top})

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.texts.bytes_of(token_id)
        text = f"token_id:{token_id}" if self.as_ids else shown(token)
        return {"token": text, "logprob": logprob, "bytes": list(token)}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else shown(self.texts.bytes_of(token_id), "bytes:")

    def _top(self, found: TokenLogprobs) -> msgspec.Raw:
        """Return the likeliest tokens, and the token itself even if it is not one of them, as OpenAI does."""
        top = {self._text(token_id): logprob for token_id, logprob in found.top[: self.num_logprobs]}
        return _json(top | {self._text(found.token_id): found.logprob})

    def _prompt_entry(self, found: TokenLogprobs, num_top: int) -> msgspec.Raw:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(found.top, 1)}
        entries = {found.token_id: found.logprob} | dict(found.top[:num_top])
        return _json(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": ranks.get(token_id),
                    "decoded_token": shown(self.texts.bytes_of(token_id)),
                }
                for token_id, logprob in entries.items()
            }
        )


def _json(value: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
