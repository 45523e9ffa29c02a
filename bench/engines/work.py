"""The jobs with which engines are compared: prompts and output lengths drawn from a seed. Pure.

All requests of a job are available from the start. Every system must generate exactly the requested number of tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.traffic.workload import generator

FIRST_TOKEN_ID = 16  # lowest token id in prompts; lower ids may be special tokens
STEP_PROMPT_TOKENS = 32  # tokens of each prompt in a measurement of decode steps
STEP_TOKENS = 32  # decode steps in one measurement; the result is their mean time


class WorkKind(StrEnum):
    DECODE = "decode"  # short prompts, long answers
    PREFILL = "prefill"  # long prompts, a few tokens
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Inclusive bounds of prompt and output lengths in tokens. Lengths are drawn uniformly between them."""

    prompt: tuple[int, int]
    new: tuple[int, int]


SHAPES = {
    WorkKind.DECODE: WorkShape((16, 64), (64, 128)),
    WorkKind.PREFILL: WorkShape((256, 1024), (4, 4)),
    WorkKind.MIXED: WorkShape((16, 512), (4, 96)),
}
QUICK_SHAPES = {
    WorkKind.DECODE: WorkShape((4, 8), (8, 16)),
    WorkKind.PREFILL: WorkShape((32, 64), (2, 2)),
    WorkKind.MIXED: WorkShape((4, 64), (2, 8)),
}


@dataclass(frozen=True, slots=True)
class Job:
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_new_tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.new_tokens, strict=True))

    def ring(self, first: int, count: int) -> list[int]:
        """Return the indices of `count` consecutive requests from `first` on.

        After the last request of the job, counting goes on with index 0. No index is returned twice.
        """
        total = len(self.prompts)
        return [(first + i) % total for i in range(min(count, total))]

    def pick(self, indices: Sequence[int]) -> "Job":
        return Job(tuple(self.prompts[i] for i in indices), tuple(self.new_tokens[i] for i in indices))


def make_job(shape: WorkShape, streams: int, vocab_size: int, seed: int, *stream: str | int) -> Job:
    """Return a job with `streams` requests. The same `seed` and `stream` always give the same job."""
    rng = generator(seed, "engine", *stream)
    lengths = rng.integers(shape.prompt[0], shape.prompt[1], size=streams, endpoint=True)
    new = rng.integers(shape.new[0], shape.new[1], size=streams, endpoint=True)
    prompts = tuple(
        tuple(rng.integers(FIRST_TOKEN_ID, vocab_size, size=length).tolist()) for length in lengths.tolist()
    )
    return Job(prompts, tuple(new.tolist()))


def make_step_jobs(streams: int, vocab_size: int, seed: int, round_: int) -> tuple[Job, Job]:
    """Return two jobs whose times differ by the time of `STEP_TOKENS` decode steps with `streams` sequences.

    The second job generates `STEP_TOKENS` more tokens for each request. The prompts of both jobs have the same length
    but different tokens, so that no prefix cache makes the second prefill cheaper.
    """
    one, more = (WorkShape((STEP_PROMPT_TOKENS,) * 2, (n, n)) for n in (1, 1 + STEP_TOKENS))
    first = make_job(one, streams, vocab_size, seed, "step", streams, round_, 0)
    return first, make_job(more, streams, vocab_size, seed, "step", streams, round_, 1)


def longest_sequence(shapes: Iterable[WorkShape]) -> int:
    """Return the tokens (prompt and output together) of the longest sequence that any job can have."""
    step = STEP_PROMPT_TOKENS + STEP_TOKENS + 1
    return max(step, *(shape.prompt[1] + shape.new[1] for shape in shapes))
