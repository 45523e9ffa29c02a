"""What a check finds; and the checks of the machine: packages, processors, memory, kernels, the model, descriptors."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from platform import machine, python_version, system

from engine.factory import build_engine
from tidegate.settings.commands import ServeSettings
from tidegate.supervision.process import raise_descriptor_limit
from tidegate.worker.engine_worker import engine_config

PACKAGES = ("torch", "transformers", "redis", "fastapi", "uvicorn")  # those whose versions matter most
GIB = 1 << 30
MIN_KV_SHARE = 0.1  # of the device's free memory: less than this beside the weights holds few sequences
# Each connection takes a descriptor, and so does each stream's connection to the store.
MANY_DESCRIPTORS = 4096


class Level(Enum):
    """How serious a finding is. The values are the words that are printed."""

    OK = "ok"
    WARNING = "warning"  # the server starts, but slower, less safe or with less than asked for
    ERROR = "error"  # `tidegate serve` with these settings does not start, or cannot answer


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str  # what was checked, one or two words
    text: str
    level: Level = Level.OK
    remedy: str = ""  # what to do; empty if there is nothing to do


def warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, text, Level.WARNING, remedy)


def error(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(subject, text, Level.ERROR, remedy)


def describe_packages(_: ServeSettings) -> Iterator[Finding]:
    """Report versions, for a question or a bug report. Does not check them: pip has chosen versions that fit."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    yield Finding("software", f"tidegate {version('tidegate')} on Python {python_version()}, {system()} {machine()}")
    yield Finding("software", packages)


def check_descriptors(_: ServeSettings) -> Iterator[Finding]:
    limit = raise_descriptor_limit()
    if limit < MANY_DESCRIPTORS:
        text = f"a process may open {limit} files, so about {limit // 2} clients can be connected"
        yield warning("descriptors", text, "raise the hard limit: `ulimit -Hn 65536`, or LimitNOFILE of the service")
    else:
        yield Finding("descriptors", f"a process may open {limit} files" if limit < 1 << 40 else "no limit")


def check_engine(settings: ServeSettings) -> Iterator[Finding]:
    """Check what the engine needs, without loading the model's weights."""
    match settings.engine:
        case "native":
            yield from _check_native(settings)
        case "vllm":
            from engine.vllm.build import check_version

            check_version()
            yield Finding("engine", f"vLLM {version('vllm')}")
        case "embedding":
            from engine.embedding.build import check_config

            check_config(engine_config(settings))
            yield Finding("engine", f"sentence-transformers {version('sentence-transformers')}")
        case "openai" | "static":
            yield Finding("engine", f"{settings.engine}: nothing is computed on this machine")


def try_engine(settings: ServeSettings) -> Iterator[Finding]:
    """Start the engine as a worker does: load the weights, try the kernels, take memory for KV."""
    if settings.engine in ("openai", "static"):
        return
    engine = build_engine(engine_config(settings))
    try:
        info = engine.info
        room = "" if info.whole_prompts else f"{info.num_blocks} KV blocks of {info.block_size} tokens "
        text = f"the engine starts: {room}on {info.device}, {info.dtype}"
        yield Finding("start", text)
    finally:
        engine.close()


def _check_native(settings: ServeSettings) -> Iterator[Finding]:
    from engine.native.startup.checkup import Checkup, examine  # imports torch

    found: Checkup = examine(engine_config(settings))
    yield Finding("engine", f"{found.device}, {found.dtype}, {found.torch_build}")
    if not found.is_gpu and settings.device == "auto" and shutil.which("nvidia-smi"):
        yield warning(
            "engine",
            "this machine has nvidia-smi, but torch finds no GPU",
            "run `nvidia-smi`; if it lists a GPU, install the torch build for its driver (https://pytorch.org)",
        )
    if found.for_vllm:
        yield warning("engine", f"vLLM may be faster here: {found.for_vllm}", "try --engine vllm (tidegate[vllm])")
    yield _kernels(found.no_kernels, is_gpu=found.is_gpu)
    yield _memory(found.free_bytes, found.weight_bytes)


def _kernels(reason: str, *, is_gpu: bool) -> Finding:
    if not reason:
        return Finding("kernels", "this program's kernels work here")
    remedy = "report the reason, with GPU and driver" if is_gpu else "install a C++ compiler, such as g++"
    remedy = "leave --no-optimize out" if reason == "--no-optimize" else remedy
    return warning("kernels", f"torch's operators are used, which are slower: {reason}", remedy)


def _memory(free: int, weights: int | None) -> Finding:
    if weights is None:
        return Finding("memory", f"{free / GIB:.1f} GiB free")
    taken = f"{weights / GIB:.1f}" if weights >= GIB / 10 else "less than 0.1"
    text = f"{free / GIB:.1f} GiB free, the weights take {taken}"
    if weights > free:
        remedy = "end other programs, or use a smaller or a quantised model, or --engine vllm on several GPUs"
        return error("memory", text, remedy)
    if free - weights < MIN_KV_SHARE * free:
        remedy = "use a smaller or a quantised model, or a short --max-model-len"
        return warning("memory", f"{text}: little is left for KV", remedy)
    return Finding("memory", text)
