"""The roofline: the shortest time that a step or a job can take at the machine's measured rates.

The roofline time of a step is the longer of two times: the time to read all weights and the KV of the context once, and
the time of all multiplications. Knows the shape of a Llama-like decoder (grouped heads, gated MLP) and arithmetic; does
not know engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from bench.engines.work import STEP_PROMPT_TOKENS, STEP_TOKENS, Job

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak rates of this machine, measured with the number of threads that the systems get."""

    bytes_per_s: float  # rate of a large read or of a large copy; the higher of the two
    flops_per_s: float  # rate of a large matrix product in the model's number format


@dataclass(frozen=True, slots=True)
class ModelShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    number_bytes: int  # of the KV, and of the weights
    file_bytes: int | None = (
        None  # of all weights, if they are quantised in a file; None: they have `number_bytes` each
    )
    ties_embeddings: bool = True  # whether the LM head is the embedding table, too

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str, file_bytes: int | None = None) -> Self | None:
        """Return the shape in the content of a `config.json`; None if the model is not a Llama-like decoder.

        `file_bytes` is the size of a file with quantised weights.
        """
        if any(key not in config for key in _KEYS) or "num_local_experts" in config:
            return None
        hidden, intermediate, layers, heads, vocab = (int(config[key]) for key in _KEYS)
        return cls(
            file_bytes=file_bytes,
            ties_embeddings=bool(config.get("tie_word_embeddings", True)),
            hidden=hidden,
            intermediate=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=vocab,
            number_bytes=NUMBER_BYTES[dtype],
        )

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of all layers, which every token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Number of weights in the LM head, which is computed for sampled rows only."""
        return self.hidden * self.vocab

    @property
    def read_bytes(self) -> float:
        """Bytes of the weights that each step reads: all but the embedding table, of which it reads single rows."""
        read = self.layer_weights + self.head_weights
        if self.file_bytes is None:
            return read * self.number_bytes
        return self.file_bytes * read / (read if self.ties_embeddings else read + self.head_weights)

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.number_bytes


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """The work of one step.

    `rows` tokens are computed, and `sampled` of them yield a new token. `attended` is the sum over the rows of the
    tokens that each row attends to. The KV of `context` tokens is read.
    """

    rows: int
    sampled: int
    attended: int
    context: int

    def num_bytes(self, shape: ModelShape) -> float:
        return shape.read_bytes + self.context * shape.kv_token_bytes

    def num_flops(self, shape: ModelShape) -> int:
        matrices = 2 * (self.rows * shape.layer_weights + self.sampled * shape.head_weights)
        return matrices + 4 * self.attended * shape.layers * shape.heads * shape.head_dim

    def roofline_s(self, shape: ModelShape, peaks: Peaks) -> float:
        return max(self.num_bytes(shape) / peaks.bytes_per_s, self.num_flops(shape) / peaks.flops_per_s)


def decode_step(streams: int, context: int) -> StepNeeds:
    """Return the work of a decode step with `streams` sequences that are `context` tokens long."""
    return StepNeeds(rows=streams, sampled=streams, attended=streams * context, context=streams * context)


def measured_step(streams: int) -> StepNeeds:
    """Return the work of the mean decode step of the jobs from `make_step_jobs`."""
    return decode_step(streams, STEP_PROMPT_TOKENS + STEP_TOKENS // 2)


def job_roofline_s(job: Job, shape: ModelShape, peaks: Peaks) -> float:
    """Return the roofline time of a job in seconds.

    The job is assumed to take one step for all prompts, and then the decode steps of the longest answer.
    """
    lengths = [len(prompt) for prompt in job.prompts]
    attended = sum(n * (n + 1) // 2 for n in lengths)
    first = StepNeeds(sum(lengths), len(lengths), attended, sum(lengths))
    total_s = first.roofline_s(shape, peaks)
    for step in range(1, max(job.new_tokens)):
        live = [n + step for n, new in zip(lengths, job.new_tokens, strict=True) if new > step]
        total_s += StepNeeds(len(live), len(live), sum(live), sum(live)).roofline_s(shape, peaks)
    return total_s
