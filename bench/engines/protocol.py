"""The messages between the benchmark and the processes of the systems: one JSON object a line, over stdin and stdout.

Standard library only, since another system runs this in its own interpreter, without our packages.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """What every system is built from.

    `kv_tokens` holds all sequences of the largest job, each rounded up to `KV_ROUNDING`: no system may be short of KV
    memory, and none may take all of it.
    """

    model_dir: str
    dtype: str
    device: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    kv_token_bytes: int  # of one token in all layers; 0: unknown


@dataclass(frozen=True, slots=True)
class Order:
    """Generate exactly `new_tokens[i]` greedy tokens for `prompts[i]`; all prompts are there at once."""

    prompts: list[list[int]]
    new_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Ready:
    """The system is loaded. `settings` names the options that it chose, for the report."""

    settings: str


@dataclass(frozen=True, slots=True)
class Done:
    """The tokens of an order.

    `idle_cpu_s` is the CPU time that the process took in the `idle_s` before this order: a process that spins while
    another system is measured would distort the comparison.
    """

    tokens: list[list[int]]
    elapsed_s: float
    idle_s: float
    idle_cpu_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


class System(Protocol):
    """One system, loaded, in its own process."""

    @property
    def settings(self) -> str: ...

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        """Return the new tokens, in the order of `prompts`."""
        ...

    def close(self) -> None:
        """End its threads, so that its process can end."""
        ...


Message = SystemSpec | Order | Ready | Done | Failed
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (SystemSpec, Order, Ready, Done, Failed)}
KV_ROUNDING = 256  # the largest KV block of any system


def encode(message: Message) -> str:
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def decode(line: str) -> Message:
    """Return the message of a line. Raises ValueError for anything else."""
    try:
        fields = json.loads(line)
        message: Message = _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:200]!r}") from error
    return message
