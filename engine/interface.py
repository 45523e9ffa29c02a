"""The seam between scheduler and engine: plain data and one Protocol.

This is the bottom of the program. It knows sequences, tokens and steps; it does not know torch, tiers, time
or HTTP. A step goes down as a `StepPlan` and comes back as a `StepResult`; nobody reaches across.

There is no prefill phase and no decode phase: each sequence has `num_computed_tokens` catching up with its
number of tokens (prompt + output). `Run(seq_id, n)` advances it by n tokens; when it has caught up, one new
token is sampled. A prefill chunk, a whole prefill and a decode are all a `Run`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class PreemptionMode(Enum):
    """What becomes of a victim's KV blocks."""

    PAUSE = "pause"  # stay on the device: the sequence sits steps out and may resume in any later one
    SWAP = "swap"  # are copied to host memory and freed; the resume copies them back
    RECOMPUTE = "recompute"  # are freed; the tokens are computed again after the resume


class StepEviction(Enum):
    """What may leave a step that runs."""

    NOTHING = "nothing"
    STEPS = "steps"  # all sequences of the step together: it is abandoned
    ROWS = "rows"  # any of them: the others go on without them


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the model's context is full


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature == 0` is greedy; `seed` is always set (the gateway draws one
    if the user did not), so that a sequence computed again, on any worker, gives the same tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # of the most likely token's probability; 0: all
    seed: int = 0
    presence_penalty: float = 0.0  # taken from the logits of tokens that the output holds
    frequency_penalty: float = 0.0  # the same, times how often
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_tokens: int = 0  # no end-of-sequence or stop token before as many were generated
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence ids
    ignore_eos: bool = False
    logprobs: int | None = None  # report each token's log probability, and those of as many likeliest; None: not
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: str | None = None  # llguidance's serialised grammar: only tokens that it allows are generated


@dataclass(frozen=True, slots=True)
class NewSequence:
    """Sequences of one `cache_salt` share KV of equal prompt beginnings, others never: the time to a first token
    tells nobody what strangers asked. Blocks of a lower `retention` leave the prefix cache first."""

    seq_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    retention: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Advance `seq_id` by at most `num_tokens` of its known tokens (≥ 1). Before the first run of a sequence
    without KV, what the prefix cache holds of it is taken from there, and only the rest is left to run."""

    seq_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preempt:
    seq_id: str
    mode: PreemptionMode


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, executed in the order of the fields. An engine refuses a plan that breaks the rules
    (`PlanError`): it is a bug of the scheduler, never a user's fault."""

    step_id: int
    abort: tuple[str, ...] = ()
    preempt: tuple[Preempt, ...] = ()
    resume: tuple[str, ...] = ()
    start: tuple[NewSequence, ...] = ()
    run: tuple[Run, ...] = ()
    ahead: bool = False  # made before the step before it was collected: sequences that have ended there are left out

    @property
    def is_empty(self) -> bool:
        return not (self.abort or self.preempt or self.resume or self.start or self.run)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.run)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one position, as the model gave them: before temperature, penalties, bias and
    grammar. `top`: the likeliest tokens as (id, log probability), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one `Run` did. `token_ids` holds the newly sampled tokens: none while a prefill is incomplete.
    With a `finish_reason` the engine has already freed the sequence.

    `num_cached_tokens` of the `num_computed_tokens` came from the prefix cache in this step. `logprobs` has one
    entry a new token, if they were asked for. `prompt_logprobs` are those of the prompt's tokens behind this step's
    (the very first token of a prompt has none); where they were asked for, nothing is taken from the prefix cache."""

    seq_id: str
    num_computed_tokens: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """One sequence broke (NaN logits, say); the engine has freed it and goes on with the others."""

    seq_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one plan. `elapsed_s` is the time the device was busy with it. `free_blocks` counts those that
    a new sequence could have, cached ones that nobody uses among them.

    `evicted` names sequences that left the step before its end (`Engine.evict`). Their outputs say what they had before
    the step and what came from the prefix cache; nothing was sampled for them, and blocks taken for the step are free.

    `shared_blocks` names sequences and how many of their blocks others hold as well, which the sequence's end or
    preemption would not free: those of whom the number is another one than before this step."""

    step_id: int
    outputs: tuple[SequenceOutput, ...] = ()
    failures: tuple[SequenceFailure, ...] = ()
    free_blocks: int = 0
    elapsed_s: float = 0.0
    free_swap_blocks: int = 0
    shared_blocks: tuple[tuple[str, int], ...] = ()
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and can hold; constant while it lives."""

    model_path: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    block_size: int  # tokens a KV block
    num_blocks: int
    max_step_tokens: int  # most tokens one plan may run
    eos_token_ids: tuple[int, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = ""
    preemption_modes: tuple[str, ...] = field(default=("pause", "recompute"))
    num_swap_blocks: int = 0  # KV blocks that host memory holds for swapped sequences
    swap_block_s: float = 0.0  # time to copy one of them either way, measured at start
    steps_ahead: int = 0  # steps that may be submitted while another runs
    step_eviction: StepEviction = StepEviction.NOTHING


class PlanError(Exception):
    """A plan names an unknown sequence, runs a paused one, or needs more blocks than are free."""


class EngineDead(Exception):
    """The engine cannot go on (device lost, thread died): the process must end non-zero."""


class Engine(Protocol):
    """Executes plans one at a time, in order.

    `submit` returns at once; `collect` waits for the oldest submitted step. At most one step is in flight, and
    `info.steps_ahead` more, whose plans say so: the host then makes plan N+1 while the device computes N.
    """

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, plan: StepPlan) -> None: ...

    async def collect(self) -> StepResult: ...

    def evict(self, seq_ids: Collection[str]) -> None:
        """Let these sequences leave the step in flight at its next layer boundary. Returns at once. A wish: it may come
        too late, and the result says what became of it. Their KV rows of the step are written again later."""
        ...

    def close(self) -> None: ...


def blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
