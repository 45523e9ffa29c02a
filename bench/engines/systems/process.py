"""The process of one system: `python -m bench.engines.systems.process NAME`.

Reads a `SystemSpec`, loads the system with that name, and runs one order after another until stdin ends. Imports only
the module of that system, since the packages of the other systems may not be installed.
"""

import importlib
import os
import sys
import time
import traceback
from contextlib import closing
from typing import TextIO

from bench.engines.systems.protocol import Done, Failed, Message, Order, Ready, System, SystemSpec, decode, encode

SYSTEMS = {
    "tidegate": "bench.engines.systems.direct:DirectEngine",
    "tidegate-int8": "bench.engines.systems.direct:Int8Engine",
    "tidegate-int4": "bench.engines.systems.direct:Int4Engine",
    "tidegate-loop": "bench.engines.systems.scheduled:ScheduledEngine",
    "generate_batch": "bench.engines.systems.transformers_generate:ContinuousBatching",
    "generate": "bench.engines.systems.transformers_generate:OneAtATime",
    "llama": "bench.engines.systems.llama_server:LlamaServer",
    "vllm": "bench.engines.systems.vllm_offline:OfflineVllm",
}


def load(name: str, spec: SystemSpec) -> System:
    module, _, attribute = SYSTEMS[name].partition(":")
    system: System = getattr(importlib.import_module(module), attribute)(spec)
    return system


def serve(name: str, orders: TextIO, replies: TextIO) -> None:
    """Answer every line of `orders` with one line in `replies`. Return when `orders` ends or the system cannot load."""
    spec = decode(orders.readline())
    if not isinstance(spec, SystemSpec):
        raise ValueError("the first line must be a SystemSpec")
    try:
        system = load(name, spec)
        _send(replies, Ready(system.settings))
    except Exception as error:  # any error of a system becomes the reason in the report
        _send(replies, _failure(error))
        return
    with closing(system):
        _answer(system, orders, replies)


def _answer(system: System, orders: TextIO, replies: TextIO) -> None:
    idle_since = (time.perf_counter(), time.process_time())
    for line in orders:
        order = decode(line)
        if not isinstance(order, Order):
            raise ValueError("only orders may follow the SystemSpec")
        _send(replies, _run(system, order, idle_since))
        idle_since = (time.perf_counter(), time.process_time())


def _run(system: System, order: Order, idle_since: tuple[float, float]) -> Message:
    idle_s = time.perf_counter() - idle_since[0]
    idle_cpu_s = time.process_time() - idle_since[1]
    started_s = time.perf_counter()
    try:
        tokens = system.generate(order.prompts, order.new_tokens)
    except Exception as error:  # any error becomes a reply; the next order may succeed
        return _failure(error)
    elapsed_s = time.perf_counter() - started_s
    return Done(tokens, elapsed_s, idle_s, idle_cpu_s)


def _failure(error: Exception) -> Failed:
    traceback.print_exc()
    return Failed(f"{type(error).__name__}: {error}")


def _send(replies: TextIO, message: Message) -> None:
    print(encode(message), file=replies, flush=True)


def main() -> None:
    """Serve orders from stdin and write replies to stdout.

    Since libraries print to stdout, replies go to a copy of it, and stdout itself is redirected to stderr.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
