"""The interface between scheduler and engine: plain data types, and the protocol `Engine`.

A scheduler decides what each step computes; an engine computes it. The scheduler sends each step as a `StepPlan` and
gets back a `StepResult`. Both are immutable, and neither side reads the other's state. Everything above this module can
be tested without torch, and every engine (native, modeled or any other) is driven in the same way:

    engine.submit(StepPlan(step_id=7, start=(new,), run=(Run("a", 512), Run("b", 1))))
    result = await engine.collect()  # StepResult: new tokens, finished sequences, free blocks, seconds

There is no prefill phase and no decode phase. A sequence is one list of known tokens, prompt and output, of which the
first `num_computed_tokens` have their keys and values (KV) in the cache. `Run(seq_id, n)` computes the next n known
tokens. When all known tokens are computed, the engine samples one new token. So a prefill chunk, a whole prefill and a
decode are all runs; a decode is a run of one token.

KV is stored in blocks of `EngineInfo.block_size` tokens. The engine allocates and shares blocks. The scheduler counts
the free blocks, and preempts sequences to free more.

This module imports nothing from the project. It knows sequences, tokens and steps; it does not know torch, tiers, time
or HTTP.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import msgspec

# What a model makes of a prompt: tokens that answer it, the vector of a text, or the score of a pair of texts.
ModelKind = Literal["chat", "embedding", "rerank"]

# -- enumerations --------------------------------------------------------------------------------------------------


class PreemptionMode(Enum):
    """A way to preempt a sequence. The modes differ in what happens to the sequence's KV blocks."""

    PAUSE = "pause"  # the blocks stay on the device
    SWAP = "swap"  # the blocks are copied to host memory and freed; resuming the sequence copies them back
    RECOMPUTE = "recompute"  # the blocks are freed; after the sequence is resumed, its tokens are recomputed


class StepEnd(Enum):
    """How a step ended, as far as its result says."""

    DONE = "done"  # it was computed
    SUSPENDED = "suspended"  # it waits between two layers; a later plan continues or drops it
    DROPPED = "dropped"  # it was suspended, and is given up: its sequences are as they were before it


class FinishReason(Enum):
    """The reason why a sequence is finished. The values are those of OpenAI's API."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens is reached, or the model's context is full


# -- from scheduler to engine: the plan of a step ------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters of sampling for one sequence. The default of each parameter has no effect, and is not encoded.

    `seed` is always set (the gateway draws a seed if the user gave none), so that a recomputed sequence gets the same
    tokens on any worker.
    """

    max_tokens: int  # maximum number of tokens to generate
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the likeliest tokens, until their probabilities add up to this
    top_k: int = 0  # keep this many of the likeliest tokens; 0: keep all
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest token's probability; 0: keep all
    seed: int = 0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted from a token's logit once per occurrence in the output
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # only these tokens are generated; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the output never has
    min_tokens: int = 0  # no end-of-sequence or stop token before this many tokens are generated
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence ids
    ignore_eos: bool = False  # continue after an end-of-sequence token
    # Report the log probabilities of the sampled token and of this many of the likeliest tokens; None: no report.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # as `logprobs`, but for the tokens of the prompt
    grammar: str | None = None  # serialised llguidance grammar; only tokens that the grammar allows are generated
    adapter: str | None = None  # name of the LoRA adapter that computes the tokens; None: the model alone

    @property
    def alters_logits(self) -> bool:
        """Whether the model's logits are changed before a token is sampled."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.min_tokens
            or self.allowed_token_ids
            or self.bad_words
            or self.grammar is not None
        )


# First words of a `GrammarError` or a `SequenceFailure` for which the request's grammar is to blame.
GRAMMAR_FAILED = "the grammar"


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that a plan starts, or continues from tokens that another engine has sampled."""

    seq_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    # Sequences share the KV of equal prompt prefixes only if their salts are equal. Otherwise a user could learn from
    # the TTFT what other users have asked.
    cache_salt: str = ""
    retention: int = 0  # the prefix cache evicts blocks of the lowest retention first
    # What `Engine.compile_grammar` has returned for `sampling.grammar`. No step compiles a grammar.
    compiled_grammar: object | None = field(default=None, compare=False)
    # The output so far. The sequence gets the same further tokens as one that has sampled these tokens here.
    output_token_ids: tuple[int, ...] = ()
    second_from: int = 0  # position of the second text of a pair; 0: the prompt is one text


class Run(msgspec.Struct, frozen=True):  # a struct, since a step makes hundreds
    """An instruction to compute the next `num_tokens` (≥ 1) known tokens of `seq_id`, or fewer if fewer are left.

    A sequence without KV first takes the blocks of its prefix that are in the prefix cache. Only the remaining tokens
    are computed.

    A decode may have a draft: the tokens that are likely to come next. They are computed in the same step. Each token
    that the sequence would have sampled anyway is accepted, up to the first that it would not; so a step may yield as
    many new tokens as the draft has, and one more. The tokens are the same with any draft. The last of them must be
    allowed by `max_tokens` and the model's context, and the sequence's logits must not be altered.
    """

    seq_id: str
    num_tokens: int
    draft: tuple[int, ...] = ()  # only where `EngineInfo.verifies_drafts`


@dataclass(frozen=True, slots=True)
class Preempt:
    """An instruction to preempt `seq_id`. The sequence is not run again until a plan resumes it."""

    seq_id: str
    mode: PreemptionMode


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step. The engine executes the fields in their order.

    An engine raises `PlanError` if a plan breaks the rules. A broken rule is a bug of the scheduler, never a user's
    fault.
    """

    step_id: int  # never reused while the engine lives
    abort: tuple[str, ...] = ()  # sequences to free
    preempt: tuple[Preempt, ...] = ()
    resume: tuple[str, ...] = ()  # preempted sequences that may be run again
    start: tuple[NewSequence, ...] = ()
    run: tuple[Run, ...] = ()
    # Async scheduling: the plan was made before the result of the previous step was known. What it says of sequences
    # that finished or failed in that step is skipped. A run of more tokens than are left, because that step found some
    # in the prefix cache, runs those that are left. It has no aborts, and its preemptions are pauses.
    ahead: bool = False
    # The suspended step goes on for this many seconds, and is suspended again if it is not done then; 0: it waits. Its
    # sequences take part in no other step. A plan that continues or drops the suspended step says nothing else.
    proceed_s: float = 0.0
    drop: bool = False  # the suspended step is dropped

    @property
    def is_empty(self) -> bool:
        return not (self.abort or self.preempt or self.resume or self.start or self.run or self.is_of_suspended)

    @property
    def is_of_suspended(self) -> bool:
        """Whether the plan continues or drops the suspended step. The result then has that step's id."""
        return self.drop or self.proceed_s > 0

    @property
    def num_tokens(self) -> int:
        """The maximum number of tokens that the step computes."""
        return sum(r.num_tokens + len(r.draft) for r in self.run)


# -- from engine to scheduler: the result of a step ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log probabilities at one position, as the model computed them.

    Temperature, penalties, bias and grammar are not applied to them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens as (id, log probability), likeliest first


class SequenceOutput(msgspec.Struct, frozen=True):  # a struct, since a step makes hundreds
    """The outcome of one `Run`."""

    seq_id: str
    num_computed_tokens: int  # computed tokens of the whole sequence after the step
    # Newly sampled tokens: none while the prefill is incomplete, and several if a draft was right.
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # if set, the engine has freed the sequence
    num_cached_tokens: int = 0  # tokens whose KV this step took from the prefix cache
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry for each of `token_ids`, if requested
    # If requested, one entry for each prompt token that follows a token of this run (so the prompt's first token has no
    # entry). A sequence that requests prompt log probabilities takes nothing from the prefix cache.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Of a model that is no chat: the embedding, or the one score, as float32 in little-endian order. One token stands
    # for it in `token_ids`.
    vector: bytes = b""
    num_prompt_tokens: int = 0  # of a prompt with images, as its server has counted it; 0: not said


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """The failure of one sequence, such as NaN logits. The engine has freed it and continues with the others."""

    seq_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one plan."""

    step_id: int
    outputs: tuple[SequenceOutput, ...] = ()  # in the order of the plan's runs
    failures: tuple[SequenceFailure, ...] = ()
    free_blocks: int = 0  # KV blocks that a new sequence could get; cached blocks that no sequence holds are included
    # Seconds that the device was busy with the step, since it began or was last continued.
    elapsed_s: float = 0.0
    # With async scheduling: seconds from the end of the step before this one until this one was launched; 0: it was
    # launched in time, or its plan was not made ahead.
    late_s: float = 0.0
    free_swap_blocks: int = 0
    # (sequence, number of its blocks that other sequences hold as well), for each sequence whose number has changed in
    # this step. Freeing or preempting the sequence would not free these blocks.
    shared_blocks: tuple[tuple[str, int], ...] = ()
    # A suspended step has no outputs yet. A dropped one has outputs that count the tokens computed before the step or
    # taken from the prefix cache; no token was sampled, and the blocks allocated for the step are free again.
    end: StepEnd = StepEnd.DONE


# -- the engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties and sizes of an engine. These values do not change while the engine exists."""

    model_path: str
    max_model_len: int  # maximum tokens in a sequence, prompt and output together
    vocab_size: int
    block_size: int  # tokens in a KV block
    num_blocks: int  # KV blocks on the device
    max_step_tokens: int  # maximum number of tokens that one plan may run
    eos_token_ids: tuple[int, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = ""
    preemption_modes: tuple[str, ...] = field(default=("pause", "recompute"))  # values of `PreemptionMode`
    num_swap_blocks: int = 0  # KV blocks of host memory, for swapped sequences
    swap_block_s: float = 0.0  # seconds to copy one block to the host or back, measured at the start
    steps_ahead: int = 0  # async scheduling: number of plans that may be submitted while a step runs; 0: none
    suspends_steps: bool = False  # a running step can be suspended between two layers
    adapters: tuple[str, ...] = ()  # names of the model's LoRA adapters
    caches_prefixes: bool = False  # prompts reuse the KV of prompts with the same beginning
    # A prompt is computed in one step, which is the last one of its sequence. One that is longer than
    # `max_step_tokens` is computed alone.
    whole_prompts: bool = False
    num_layers: int = 30  # of the model; a running step is suspended between two layers
    takes_images: bool = False  # serves requests with `StreamRequest.chat`
    verifies_drafts: bool = False  # speculative decoding: takes a `Run.draft`


class PlanError(Exception):
    """The error of a plan that breaks the rules, such as one that needs more blocks than are free."""


class GrammarError(Exception):
    """The error of a grammar that cannot be compiled, or that the output does not match. Users get the message."""


class EngineDead(Exception):
    """The error of an engine that cannot continue. The process must then end with a non-zero exit status."""


class Engine(Protocol):
    """An engine: it executes plans one at a time, in the order of submission.

    With async scheduling, the host plans step N+1 while the device computes step N: up to `info.steps_ahead` more steps
    than one may be in flight, and their plans have `ahead` set.
    """

    @property
    def info(self) -> EngineInfo: ...

    async def compile_grammar(self, grammar: str) -> object:
        """Compile a grammar beside the steps, for `NewSequence.compiled_grammar`. Raises `GrammarError`."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Submit a plan and return at once.

        Raises `EngineDead` if the engine has stopped, `RuntimeError` or `PlanError` if too many steps are in flight.
        """
        ...

    async def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its result.

        If this call is cancelled, the next call waits for the same step, so no result is lost. Raises `PlanError` if
        the engine refused the plan, and `EngineDead` if the engine has stopped.
        """
        ...

    def check_alive(self) -> None:
        """Raise `EngineDead` if the engine has stopped, which it may do while no step is in flight."""
        ...

    def suspend(self) -> None:
        """Request that the step in flight is suspended at its next layer boundary, and return at once.

        The request has no effect if it comes after the last boundary, if another step is suspended, or if the engine
        suspends no steps: the result says how the step ended.
        """
        ...

    def close(self) -> None:
        """Finish the steps in flight and free the engine."""
        ...


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of KV blocks that `num_tokens` tokens need."""
    return -(-num_tokens // block_size)
