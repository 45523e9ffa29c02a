"""The size of a batch's input: how many requests, how much text, how many output tokens they may ask for.

Counts without a tokenizer, because a batch is answered before its 100,000 lines could be tokenised. Prompts count as
the JSON that they are sent as, whose names and brackets stand for the tokens that a chat template adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.jobs.batches.input.order import BLOCK_BYTES, DIGEST_BYTES, LinePrompt
from gateway.jobs.batches.input.prompt_text import count_of, output_limit, prompt_bytes

# Blocks of a prompt that are compared at once. It begins like an earlier one as far as their first blocks are equal.
COMPARED_BLOCKS = 4
TOKEN_BYTES = 4  # usual length of a token in English text
COMPLETIONS_MAX_TOKENS = 16  # of /v1/completions without `max_tokens`
WITHOUT_OUTPUT = ("/v1/embeddings", "/v1/rerank")  # endpoints whose answers have no tokens


@dataclass(frozen=True, slots=True)
class InputSize:
    """The sums over the requests of an input.

    `distinct_bytes` is the part of the prompts that no earlier prompt begins with: the prefix cache saves no more than
    the rest. Of `choices`, `unlimited` have no maximum of output tokens; the others generate at most `max_output`
    tokens together. `min_output` tokens are generated in any case.
    """

    lines: int = 0
    choices: int = 0
    prompt_bytes: int = 0
    distinct_bytes: int = 0
    min_output: int = 0
    max_output: int = 0
    unlimited: int = 0
    model: str | None = None  # of the first line

    def plus(self, other: "InputSize") -> "InputSize":
        """Return the size of both inputs together. Prompts of one that begin like prompts of the other count fully."""
        return InputSize(
            self.lines + other.lines,
            self.choices + other.choices,
            self.prompt_bytes + other.prompt_bytes,
            self.distinct_bytes + other.distinct_bytes,
            self.min_output + other.min_output,
            self.max_output + other.max_output,
            self.unlimited + other.unlimited,
            self.model or other.model,
        )


@dataclass(frozen=True, slots=True)
class LineSize:
    """The size of one request."""

    prompt_bytes: int
    choices: int
    limit: int | None  # maximum of output tokens of a choice; None: what the context leaves
    min_output: int  # tokens that a choice generates in any case


def line_size(body: Mapping[str, Any]) -> LineSize:
    """Return the size of a request from its body."""
    return _line_size(body, len(prompt_bytes(body)))


class SizeSum:
    """The size of an input whose requests are added one after the other: `total`."""

    def __init__(self) -> None:
        self.total = InputSize()
        self._seen: set[bytes] = set()

    def add(self, body: Mapping[str, Any], prompt: LinePrompt, *, generates: bool = True) -> None:
        """Add a request. `prompt` is that of its body; `generates` says whether its answer has tokens."""
        size, model = _line_size(body, prompt.num_bytes), body.get("model")
        n, limit = size.choices, size.limit if generates else 0
        model = model if isinstance(model, str) else None
        sizes = prompt.num_bytes, self._distinct(prompt)
        self.total = self.total.plus(
            InputSize(1, n, *sizes, n * size.min_output, n * (limit or 0), n * (limit is None), model)
        )

    def _distinct(self, prompt: LinePrompt) -> int:
        """Return how many bytes follow the longest beginning that an earlier prompt has too."""
        step = COMPARED_BLOCKS * DIGEST_BYTES
        ends = range(step, len(prompt.digests) + 1, step)
        digests = [prompt.digests[end - DIGEST_BYTES : end] for end in ends]
        num_known = next((i for i, digest in enumerate(digests) if digest not in self._seen), len(digests))
        self._seen.update(digests[num_known:])
        return prompt.num_bytes - num_known * COMPARED_BLOCKS * BLOCK_BYTES


def _line_size(body: Mapping[str, Any], num_prompt_bytes: int) -> LineSize:
    choices = max(count_of(body.get("n")) or 1, count_of(body.get("best_of")) or 1)
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        choices *= len(prompts)
    limit = output_limit(body)
    if limit is None and "prompt" in body:
        limit = COMPLETIONS_MAX_TOKENS
    least = limit if body.get("ignore_eos") is True else count_of(body.get("min_tokens"))
    return LineSize(num_prompt_bytes, choices, limit, least or 0)
