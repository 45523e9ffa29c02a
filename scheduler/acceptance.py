"""Why a claimed request can never be served by this worker. Pure: knows a request and what the engine holds at most.

The gateway refuses most of these before; what gets here was checked against another engine, or has ended its workers.
"""

from engine.interface import EngineInfo
from scheduler.request import Claimed


def reason_against(claimed: Claimed, engine: EngineInfo, max_attempts: int) -> str:
    """A sentence for the user; empty where nothing speaks against it. `max_attempts`: claims that nobody finished or
    gave back."""
    if claimed.attempt > max_attempts:  # one that ends its worker each time would otherwise go round for ever
        return f"The request was given up: {max_attempts} attempts at it ended without a result."
    request = claimed.request
    capacity = engine.num_blocks * engine.block_size
    room = min(engine.max_model_len, capacity)
    prompt = request.prompt_token_ids
    if not prompt or len(prompt) >= room:
        return f"A prompt of {len(prompt)} tokens does not fit: the engine holds 1 to {room - 1}."
    if min(prompt) < 0 or max(prompt) >= engine.vocab_size:
        return f"The prompt has token ids outside the vocabulary of {engine.vocab_size}."
    if request.sampling.max_tokens < 1:
        return "There is nothing to generate: max_tokens is below 1."
    if min(request.max_total_tokens, engine.max_model_len) > capacity:
        return f"Prompt and output together may outgrow the {capacity} tokens that the engine holds."
    return ""
