"""The messages between the benchmark and the processes of the systems: one JSON object per line, on stdin and stdout.

Imports the standard library only, since vLLM's interpreter imports this module without our packages.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """The model and the settings that every system is built with.

    `kv_tokens` is the KV memory in tokens. It holds all sequences of the largest job, each rounded up to `KV_ROUNDING`,
    so that no system runs out of KV memory and none takes all memory of the device.
    """

    model_dir: str
    dtype: str
    device: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    kv_token_bytes: int  # KV bytes of one token in all layers; 0: unknown
    gguf: str = ""  # the GGUF file of which model_dir was made, if there is one


@dataclass(frozen=True, slots=True)
class Order:
    """An order to generate exactly `new_tokens[i]` greedy tokens for `prompts[i]`.

    All prompts are available from the start.
    """

    prompts: list[list[int]]
    new_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Ready:
    """The reply of a loaded system. `settings` describes the options that the system uses, for the report."""

    settings: str


@dataclass(frozen=True, slots=True)
class Done:
    """The reply to an order: its tokens, and the seconds that generating them took.

    `idle_s` is the time from the end of the previous order (for the first order: of loading) to the start of this one.
    `idle_cpu_s` is the CPU time that the process took during that time. A process that takes CPU time while another
    system is measured distorts the comparison.
    """

    tokens: list[list[int]]
    elapsed_s: float
    idle_s: float
    idle_cpu_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


class System(Protocol):
    """One loaded system, as its own process uses it."""

    @property
    def settings(self) -> str: ...

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        """Return the new tokens, in the order of `prompts`."""
        ...

    def close(self) -> None:
        """End the system's threads, so that its process can end."""
        ...


Message = SystemSpec | Order | Ready | Done | Failed
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (SystemSpec, Order, Ready, Done, Failed)}
KV_ROUNDING = 256  # the largest KV block of any system


def encode(message: Message) -> str:
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def decode(line: str) -> Message:
    """Return the message in a line. Raises `ValueError` if the line is not a message."""
    try:
        fields = json.loads(line)
        message: Message = _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:200]!r}") from error
    return message
