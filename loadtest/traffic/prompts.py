"""The content of planned requests: token ids or words, drawn from the seeds of their segments, and nonces.

All functions are pure. Knows vocabularies; does not know when requests are sent. A segment has the same text in every
prompt.
"""

import numpy as np

from loadtest.traffic.workload import PlannedRequest, Segment, generator

# Prompt ids are above the ids of special tokens, and below the size of small vocabularies.
FIRST_PROMPT_TOKEN_ID, END_PROMPT_TOKEN_ID = 16, 500

# Words that are a single token in tokenizers for English, together with the space before the word.
WORDS = (
    "the of and to in is that it for as with on be at by this have from or one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where "
    "most know get through back much before go good new write our used me man too any day same right look"
)


def token_prompt(planned: PlannedRequest) -> list[int]:
    """Return exactly `prompt_tokens` token ids. They are below 500, so that every model has them."""
    return [i for segment in planned.segments for i in _draw(segment, FIRST_PROMPT_TOKEN_ID, END_PROMPT_TOKEN_ID)]


def word_prompt(planned: PlannedRequest) -> str:
    """Return words that are about `prompt_tokens` tokens. The `usage` of the answer gives the exact number."""
    words = WORDS.split()
    return " ".join(words[i] for segment in planned.segments for i in _draw(segment, 0, len(words)))


def _draw(segment: Segment, low: int, high: int) -> list[int]:
    return [int(i) for i in generator(segment.seed).integers(low, high, size=segment.tokens)]


def draw_nonces(count: int, seed: int) -> list[str]:
    """Return `count` different nonces such as `k7Qz-09ab`.

    None has a character twice: of others, the demo model gets about one in a thousand wrong.
    """
    rng = generator(seed, "nonce")
    letters = np.array(list("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789"))
    nonces: dict[str, None] = {}
    while len(nonces) < count:
        drawn = "".join(rng.choice(letters, size=8, replace=False))
        nonces[f"{drawn[:4]}-{drawn[4:]}"] = None
    return list(nonces)
