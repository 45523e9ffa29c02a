"""A check with concurrent nonces over all tiers, which shows that no sequence sees tokens of another sequence.

Each request asks the model to repeat the request's own nonce. Half of the requests are streamed. An answer that is not
exactly its nonce is wrong, and an answer that holds another request's nonce is a leak.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.client.answer import Outcome
from loadtest.client.http import Target, completion_body, send
from loadtest.traffic.prompts import draw_nonces

MAX_NONCE_TOKENS = 48  # enough to repeat a nonce with any tokenizer
LEAK = "holds the nonce of another request"


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    service_tier: str
    streamed: bool
    nonce: str
    answer: str
    problem: str

    @property
    def is_leak(self) -> bool:
        return self.problem.startswith(LEAK)


@dataclass(frozen=True, slots=True)
class NonceResult:
    requests: int
    right: dict[str, int]  # number of right answers by requested service tier
    answered_as: dict[str, list[str]]  # requested service tier → service tiers in the answers
    wrong: tuple[WrongAnswer, ...]

    @property
    def leaks(self) -> int:
        return sum(w.is_leak for w in self.wrong)

    @property
    def passed(self) -> bool:
        return not self.wrong and sum(self.right.values()) == self.requests


async def run_nonces(
    target: Target, *, requests: int, service_tiers: Sequence[str], seed: int, timeout_s: float
) -> NonceResult:
    """Send all requests at once, and compare each answer with its nonce.

    The requests alternate between the tiers. In each tier, half of the requests are streamed.
    """
    nonces = draw_nonces(requests, seed)
    tiers = [service_tiers[i % len(service_tiers)] for i in range(requests)]
    streamed = [(i // len(service_tiers)) % 2 == 0 for i in range(requests)]
    outcomes = [Outcome(tier, i, due_s=0.0) for i, tier in enumerate(tiers)]
    sends = [
        _ask(target, nonce, tier, stream, outcome)
        for nonce, tier, stream, outcome in zip(nonces, tiers, streamed, outcomes, strict=True)
    ]
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*sends)
    except TimeoutError:
        for outcome in outcomes:
            if outcome.finished_s is None and outcome.error is None:
                outcome.error = f"no answer within {timeout_s:g} s"
    return _result(nonces, outcomes, streamed)


async def _ask(target: Target, nonce: str, service_tier: str, stream: bool, outcome: Outcome) -> None:
    path, body = completion_body(
        target,
        f"Repeat: {nonce}",
        MAX_NONCE_TOKENS,
        stream=stream,
        ignore_eos=None,
        service_tier=service_tier,
    )
    await send(target, path, body, outcome, streamed=stream)


def _result(nonces: Sequence[str], outcomes: Sequence[Outcome], streamed: Sequence[bool]) -> NonceResult:
    right: dict[str, int] = {}
    answered_as: dict[str, list[str]] = {}
    wrong: list[WrongAnswer] = []
    for nonce, outcome, stream in zip(nonces, outcomes, streamed, strict=True):
        tier = outcome.traffic_class
        problem = find_problem(nonce, outcome, nonces)
        if problem is None:
            right[tier] = right.get(tier, 0) + 1
        else:
            wrong.append(WrongAnswer(tier, stream, nonce, outcome.text, problem))
        named = answered_as.setdefault(tier, [])
        if outcome.service_tier and outcome.service_tier not in named:
            named.append(outcome.service_tier)
    return NonceResult(len(nonces), right, answered_as, tuple(wrong))


def find_problem(nonce: str, outcome: Outcome, nonces: Sequence[str]) -> str | None:
    """Return what is wrong with an answer; None if the answer is exactly its nonce."""
    if outcome.error is not None:
        return outcome.error
    if outcome.text.strip() == nonce:
        return None
    leaked = [other for other in nonces if other != nonce and other in outcome.text]
    return f"{LEAK}: {leaked[0]}" if leaked else "is not its nonce"
