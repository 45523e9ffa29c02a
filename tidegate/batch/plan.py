"""What a batch would take, before anything runs: counted here, and estimated by the server if it has estimates.

Knows sizes and the answer of `POST /v1/batches/estimate`; does not know tables or runs. Other servers have no
estimates: then only what can be counted is said.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import reduce
from typing import Any

from gateway.jobs.batches.input.scan import input_size
from gateway.jobs.batches.input.size import TOKEN_BYTES, InputSize
from tidegate.batch.server import BatchServer
from tidegate.batch.work import Work


def plan_of(work: Work, server: BatchServer, window: str) -> Iterator[str]:
    """Yield the lines of the plan of a run."""
    size = reduce(InputSize.plus, (input_size(work.path(part, "requests")) for part in work.parts))
    yield f"{size.lines} requests for {work.endpoint} ({size.model}), in {len(work.parts)} batch(es)."
    answer = server.estimate(work.endpoint, window, size)
    if answer is None:
        yield from _counted(size)
    else:
        yield from _estimated(answer, window)


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "12 min", "3 h 20 min", "2 d 4 h"."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{round(seconds)} s"
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def _counted(size: InputSize) -> Iterator[str]:
    yield f"Prompt tokens: about {_count(size.prompt_bytes / TOKEN_BYTES)}, at {TOKEN_BYTES} bytes a token."
    if size.unlimited:
        yield f"Output tokens: not known; {size.unlimited} answers have no max_tokens."
    else:
        yield f"Output tokens: at most {_count(size.max_output)}."
    yield "This server has no estimates of the time."


def _estimated(answer: Mapping[str, Any], window: str) -> Iterator[str]:
    yield f"Prompt tokens: {_range(answer['prompt_tokens'])}."
    yield f"Output tokens: {_range(answer['output_tokens'])}."
    estimate = answer.get("estimate")
    if estimate is None:
        yield "Time: not known yet; the server has computed too little."
    else:
        yield f"Time: {_time(estimate)}, beside what is queued."
    earliest = answer.get("earliest_window")
    if earliest is not None:
        verdict = "feasible" if answer["feasible"] else "not feasible, so the batch would be refused"
        yield f"Earliest window: {earliest}; {window} is {verdict}."
    elif answer["feasible"] is False:
        yield "No window is long enough at present, so the batch would be refused."
    for tier in answer.get("interactive", ()):
        yield _effect(tier, bool(answer.get("becomes_urgent")))


def _effect(tier: Mapping[str, Any], becomes_urgent: bool) -> str:
    """Return what the batch may do to the answers of an interactive tier at most."""
    slo = ", ".join(
        f"{words} {tier[key]:g} ms"
        for key, words in (("ttft_p99_ms", "first tokens within"), ("itl_p99_ms", "gaps within"))
        if tier.get(key) is not None
    )
    slowdown = tier.get("max_slowdown")
    usual = "only its SLO limits the slowdown" if slowdown is None else f"answers up to {slowdown:g} times as long"
    late = "it will probably get close to its deadline, and then" if becomes_urgent else "close to its deadline,"
    return f"Peak effect on {tier['tier']}: {usual}; {late} whatever the SLO leaves ({slo})."


def _time(estimate: Mapping[str, Any]) -> str:
    now_s = datetime.now().timestamp()
    finish, low, high = (max(0.0, estimate[key] - now_s) for key in ("finish_at", "earliest", "latest"))
    return f"about {duration(finish)} (from {duration(low)} to {duration(high)})"


def _range(tokens: Mapping[str, int]) -> str:
    return f"about {_count(tokens['expected'])} (from {_count(tokens['low'])} to {_count(tokens['high'])})"


def _count(tokens: float) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if tokens >= unit:
            return f"{tokens / (1e3 if unit == 1e4 else unit):.3g}{name}"
    return f"{tokens:.0f}"
