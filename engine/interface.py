"""The interface between scheduler and engine: plain data, and one Protocol.

A scheduler decides what each step computes; an engine computes it. A step goes down as a `StepPlan` and comes back as a
`StepResult`, both immutable; neither side reads the other's state. Everything above this module can be tested without
torch, and every engine (native, modeled, another one) is driven in the same way:

    engine.submit(StepPlan(step_id=7, start=(new,), run=(Run("a", 512), Run("b", 1))))
    result = await engine.collect()  # StepResult: new tokens, finished sequences, free blocks, seconds

There is no prefill phase and no decode phase. A sequence is one list of known tokens, prompt and output, of which the
first `num_computed_tokens` have their keys and values (KV) in the cache. `Run(seq_id, n)` computes the next n. When all
known tokens are computed, the engine samples one new token. So a prefill chunk, a whole prefill and a decode are all
runs; a decode is a run of one token.

KV lies in blocks of `EngineInfo.block_size` tokens. The engine allocates and shares blocks; the scheduler counts them
and preempts sequences to get more.

This module imports nothing of the project. It knows sequences, tokens and steps; not torch, tiers, time or HTTP.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

# -- enumerations --------------------------------------------------------------------------------------------------


class PreemptionMode(Enum):
    """The ways to preempt a sequence; they differ in what happens to its KV blocks."""

    PAUSE = "pause"  # they stay on the device; the sequence is not run until it is resumed
    SWAP = "swap"  # they are copied to host memory and freed; the resume copies them back
    RECOMPUTE = "recompute"  # they are freed; after the resume the tokens are computed again


class StepEviction(Enum):
    """The granularity at which an engine can evict sequences from a running step."""

    NOTHING = "nothing"
    STEPS = "steps"  # all sequences of the step together, which ends it
    ROWS = "rows"  # any sequences; the step goes on with the others


class FinishReason(Enum):
    """The reasons why a sequence is finished; the values are those of OpenAI's API."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the model's context is full


# -- down: the plan of a step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters that choose a sequence's tokens. Values with no effect are the defaults.

    `seed` is always set (the gateway draws one if the user did not), so that a sequence that is computed again, on any
    worker, gets the same tokens.
    """

    max_tokens: int  # most tokens to generate
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the likeliest tokens whose probabilities sum up to this
    top_k: int = 0  # keep this many of the likeliest tokens; 0: all
    min_p: float = 0.0  # keep tokens with this share of the likeliest one's probability; 0: all
    seed: int = 0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, times the token's count in the output
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    min_tokens: int = 0  # no end-of-sequence or stop token before this many tokens are generated
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence ids
    ignore_eos: bool = False  # go on after an end-of-sequence token
    logprobs: int | None = None  # report log probabilities: the token's and this many likeliest ones'; None: no report
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: str | None = None  # serialised llguidance grammar: only tokens that it allows are generated


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that a plan starts."""

    seq_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    # Sequences share the KV of equal prompt beginnings only within one salt: otherwise the time to a first token would
    # tell a user what other users have asked.
    cache_salt: str = ""
    retention: int = 0  # cached blocks of the lowest retention are reused first


@dataclass(frozen=True, slots=True)
class Run:
    """Compute the next `num_tokens` (≥ 1) known tokens of `seq_id`, or fewer if fewer are left.

    A sequence without KV first takes what the prefix cache holds of its beginning; only the rest is left to compute.
    """

    seq_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take `seq_id` out of the running sequences until a plan resumes it."""

    seq_id: str
    mode: PreemptionMode


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The engine executes it in the order of the fields.

    An engine raises `PlanError` for a plan that breaks the rules. That is a bug of the scheduler, never a user's fault.
    """

    step_id: int  # never reused while the engine lives
    abort: tuple[str, ...] = ()  # free these sequences
    preempt: tuple[Preempt, ...] = ()
    resume: tuple[str, ...] = ()  # preempted sequences that may be run again
    start: tuple[NewSequence, ...] = ()
    run: tuple[Run, ...] = ()
    # Async scheduling: the plan was made before the result of the previous step was known. Runs of sequences that
    # finished or failed in that step are skipped.
    ahead: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.abort or self.preempt or self.resume or self.start or self.run)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, at most."""
        return sum(r.num_tokens for r in self.run)


# -- up: the result of a step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position, as the model gave them: before temperature, penalties, bias and
    grammar."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens as (id, log probability), likeliest first


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The outcome of one `Run`."""

    seq_id: str
    num_computed_tokens: int  # of the whole sequence, after the step
    token_ids: tuple[int, ...] = ()  # newly sampled; empty while the prefill is incomplete
    finish_reason: FinishReason | None = None  # if set, the engine has freed the sequence
    num_cached_tokens: int = 0  # computed tokens that this step took from the prefix cache
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry for each of `token_ids`, if requested
    # One entry for each prompt token that follows a token of this run, if requested (so the prompt's first token has
    # none). A sequence that requests them takes nothing from the prefix cache.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """One sequence cannot go on (NaN logits, for example). The engine has freed it and goes on with the others."""

    seq_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one plan."""

    step_id: int
    outputs: tuple[SequenceOutput, ...] = ()  # in the order of the plan's runs
    failures: tuple[SequenceFailure, ...] = ()
    free_blocks: int = 0  # KV blocks that a new sequence could get, unused blocks of the prefix cache included
    elapsed_s: float = 0.0  # seconds that the device was busy with the step
    free_swap_blocks: int = 0
    # (sequence, number of its blocks that other sequences hold as well), where that number has changed in this step.
    # Freeing or preempting the sequence would not free these blocks.
    shared_blocks: tuple[tuple[str, int], ...] = ()
    # Sequences that were evicted from the step (`Engine.evict`). Each has an output with the tokens computed before the
    # step or taken from the prefix cache; nothing was sampled, and blocks allocated for the step are free again.
    evicted: tuple[str, ...] = ()


# -- the engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties and sizes of an engine, constant while it lives."""

    model_path: str
    max_model_len: int  # most tokens of a sequence, prompt and output together
    vocab_size: int
    block_size: int  # tokens of a KV block
    num_blocks: int  # KV blocks on the device
    max_step_tokens: int  # most tokens that one plan may run
    eos_token_ids: tuple[int, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = ""
    preemption_modes: tuple[str, ...] = field(default=("pause", "recompute"))  # values of `PreemptionMode`
    num_swap_blocks: int = 0  # KV blocks of host memory, for swapped sequences
    swap_block_s: float = 0.0  # seconds to copy one block to the host or back, measured at the start
    steps_ahead: int = 0  # async scheduling: plans that may be submitted while a step runs; 0: none
    step_eviction: StepEviction = StepEviction.NOTHING


class PlanError(Exception):
    """A plan breaks the rules: it names an unknown sequence, runs a paused one, or needs more blocks than are free."""


class EngineDead(Exception):
    """The engine cannot go on (device lost, thread ended). The process must end with a non-zero exit status."""


class Engine(Protocol):
    """Executes plans one at a time, in the order of submission.

    One step is in flight at a time. With async scheduling, `info.steps_ahead` more may be, whose plans say `ahead`: the
    host then plans step N+1 while the device computes step N.
    """

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan and return at once. Raises `EngineDead`, and `RuntimeError` or `PlanError` if too many steps
        are in flight."""
        ...

    async def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its result. Cancelling it loses nothing. Raises `PlanError` if
        the engine refused the plan, and `EngineDead`."""
        ...

    def evict(self, seq_ids: Collection[str]) -> None:
        """Ask to evict these sequences from the oldest step in flight at its next layer boundary, and return at once.
        The request may come too late: the step's result says which sequences were evicted. A later run computes their
        tokens of the step again."""
        ...

    def close(self) -> None:
        """Finish the steps in flight and free the engine."""
        ...


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
