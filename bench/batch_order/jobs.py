"""The jobs on which orders are compared: inputs of the Batch API, drawn from a seed. Pure.

summaries, evaluation and synthesis are the shipped bulk pools B1, B2 and B3. few-shot asks one question after another
of 57 subjects, each behind the examples of its subject, and wants a sentence as the answer. Prompts are token ids, so
that every model can run them; lengths are scaled to the model's context.
"""

from dataclasses import replace
from itertools import islice
from typing import Any

from loadtest.traffic.prompts import token_prompt
from loadtest.traffic.scenario import TrafficClass, load_scenario
from loadtest.traffic.workload import PlannedRequest, plan_closed_loop, shared_prefixes

POOLS = {"summaries": "b1-summaries", "evaluation": "b2-evaluation", "synthesis": "b3-synthesis"}
FEW_SHOT = "few-shot"
FEW_SHOT_OUTPUTS = (16, 64)  # tokens
JOBS = (*POOLS, FEW_SHOT)
MODEL = "model"


def make_job_lines(name: str, count: int, context: int, seed: int) -> list[dict[str, Any]]:
    """Return the lines of a job, in the order of its input."""
    traffic = _traffic(POOLS.get(name, POOLS["evaluation"]), context)
    planned = list(islice(plan_closed_loop(traffic, seed, 0), count))
    if name == FEW_SHOT:
        planned = _few_shot(planned, traffic, seed)
    return [_line(i, request) for i, request in enumerate(planned)]


def _traffic(pool: str, context: int) -> TrafficClass:
    scenario = load_scenario("w1-chat", pool)
    scenario = scenario.with_lengths_scaled(scenario.scale_for(context))
    return scenario.with_role("bulk")[0]


def _few_shot(planned: list[PlannedRequest], traffic: TrafficClass, seed: int) -> list[PlannedRequest]:
    """Return the questions with their subjects one after the other, and with longer answers."""
    shared, (low, high) = shared_prefixes(traffic, seed), FEW_SHOT_OUTPUTS
    changed = []
    for i, request in enumerate(planned):
        prefix = shared[i % len(shared)]
        total = request.prompt_tokens - request.prefix_tokens + prefix.tokens
        output = low + request.prompt_seed % (high - low + 1)
        changed.append(replace(request, prefix=(prefix,), prompt_tokens=total, output_tokens=output))
    return changed


def _line(i: int, request: PlannedRequest) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": token_prompt(request),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body}
