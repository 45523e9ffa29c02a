"""Explain a path that this server does not have: an endpoint of OpenAI that is not served, or a mistake in the URL.

Knows paths; does not know HTTP, and asks its caller which paths are served.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

# First parts, behind /v1, of the paths of OpenAI's endpoints that this server does not serve, also of retired ones.
OPENAI = """
    answers assistants audio chatkit classifications containers conversations edits embeddings engines evals fine-tunes
    fine_tuning images moderations organization projects realtime search skills threads vector_stores videos
"""
OTHERS = "classify messages pooling rerank score"  # the same, of vLLM and Anthropic
NOT_SERVED = frozenset((OPENAI + OTHERS).split())
# Likeness from which a served path counts as the one that was meant, on difflib's scale from 0 to 1.
MIN_LIKENESS = 0.85
MAX_PARTS = 16  # paths with more parts are not examined: the work would grow with the square of their length


@dataclass(frozen=True, slots=True)
class UnknownPath:
    is_not_served: bool  # True: the path is right, but of an endpoint that this server does not have
    meant: str | None = None  # the served path that was probably meant


def explain_path(path: str, served: Sequence[str], is_served: Callable[[str], bool]) -> UnknownPath:
    """Return what is wrong with `path`.

    `served` holds the served paths without parameters. `is_served` also knows the paths with parameters.
    """
    parts = [part for part in path.split("/") if part]
    behind = parts[_end_of_prefix(parts) :]
    if not behind or len(parts) > MAX_PARTS:
        return UnknownPath(False)
    for candidate in ("/" + "/".join(parts), "/v1/" + "/".join(behind), "/" + "/".join(behind)):
        if candidate != path and is_served(candidate):
            return UnknownPath(False, candidate)
    if behind[0] in NOT_SERVED or behind[:2] == ["chat", "completions"]:
        return UnknownPath(True)
    ends = ["/v1/" + "/".join(behind[i:]) for i in range(1, len(behind))]  # such as behind /openai/deployments/NAME
    close = get_close_matches("/v1/" + "/".join(behind), served, n=1, cutoff=MIN_LIKENESS)
    return UnknownPath(False, next((path for path in (*ends, *close) if path in served), None))


def _end_of_prefix(parts: Sequence[str]) -> int:
    """Return the index behind the last `v1`; 0 if there is none."""
    return max((i + 1 for i, part in enumerate(parts) if part == "v1"), default=0)
