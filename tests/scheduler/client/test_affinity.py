"""Which workers are preferred for a prompt, and how much busier they may be."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.client import affinity
from scheduler.client.affinity import BLOCK, PrefixAffinity
from scheduler.client.inflight import TierUsage
from scheduler.queue.base import Preference
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import make_request

CAPACITY = TierCapacity(prefill_tokens_per_s=1000.0, whole_output_tokens_per_s=100.0)
STATUS = WorkerStatus(
    "w1", ("m",), 9999, 1000, 0, tiers={"realtime": TierStatus(capacity=CAPACITY)}, caches_prefixes=True
)
WORKERS = tuple(replace(STATUS, worker_id=name) for name in ("w1", "w2", "w3"))


class Gateway:
    """Puts requests and hears of their first tokens."""

    def __init__(self) -> None:
        self.affinity = PrefixAffinity()
        self.num_put = 0

    def prefer(self, prompt: range, workers: tuple[WorkerStatus, ...] = WORKERS, **more: Any) -> Preference | None:
        return self.put(prompt, workers, **more)[1]

    def put(self, prompt: range, workers: tuple[WorkerStatus, ...], **more: Any) -> tuple[Request, Preference | None]:
        self.num_put += 1
        request = make_request(f"r{self.num_put}", prompt=prompt, **{"max_tokens": 10, **more})
        return request, self.affinity.prefer([request], workers, TierUsage(output_share=0.4), EPOCH_MS)

    def serve(self, prompt: range, worker: str, **more: Any) -> None:
        request, _ = self.put(prompt, WORKERS, **more)
        self.affinity.on_event(TokenEvent(request.id, EventKind.TOKENS, 0, (5,), worker=worker))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_the_next_turn_prefers_the_worker_of_the_last_one_by_what_it_saves(gateway: Gateway) -> None:
    turn, next_turn = range(10 * BLOCK + 30), range(10 * BLOCK + 100)
    assert gateway.prefer(next_turn) is None
    gateway.serve(turn, "w2")
    # 640 cached tokens save 0.64 s; 100 tokens and 4 of output are left, 0.14 s. What others hold is half done.
    assert gateway.prefer(next_turn) == Preference(("w2",), int(0.64 / 0.07), EPOCH_MS + 640)


def test_a_longer_beginning_goes_before_a_shorter_one_and_what_all_hold_saves_nothing(gateway: Gateway) -> None:
    common, chat = range(8 * BLOCK + 1), range(12 * BLOCK + 1)
    gateway.serve(common, "w1")
    gateway.serve(chat, "w2")
    gateway.serve(common, "w3")
    prefer = gateway.prefer(range(12 * BLOCK + 200))
    assert prefer is not None and prefer.workers == ("w2",)
    assert prefer.until_ms == EPOCH_MS + 4 * BLOCK, "the four blocks that only it holds"
    assert gateway.prefer(range(8 * BLOCK + 200)) is None


def test_the_more_often_a_beginning_is_used_the_less_busy_may_its_workers_be(gateway: Gateway) -> None:
    slacks = []
    for n in range(4):
        gateway.serve(range(16 * BLOCK + 1 + n), "w1" if n < 3 else "w2")
        prefer = gateway.prefer(range(16 * BLOCK + 100))
        assert prefer is not None
        slacks.append((prefer.workers, prefer.slack))
    one = slacks[0][1]
    assert one > 6
    assert slacks == [(("w1",), one), (("w1",), one // 2), (("w1",), one // 3), (("w1", "w2"), one // 2)]


def test_a_shared_beginning_is_known_although_no_prompt_ended_there(gateway: Gateway) -> None:
    gateway.serve(range(16 * BLOCK + 1), "w1")
    branch = [*range(5 * BLOCK), *range(9000, 9000 + 5 * BLOCK)]
    prefer = gateway.prefer(branch)  # type: ignore[arg-type]
    assert prefer is not None and prefer.until_ms == EPOCH_MS + 4 * BLOCK


@pytest.mark.parametrize("other", [{"cache_salt": "other"}, {"adapter": "other"}, {"prompt_logprobs": 0}])
def test_requests_that_share_no_kv_prefer_nobody(gateway: Gateway, other: dict[str, Any]) -> None:
    prompt = range(10 * BLOCK + 1)
    gateway.serve(prompt, "w2")
    assert gateway.prefer(prompt) is not None
    assert gateway.prefer(prompt, **other) is None


def test_only_live_workers_with_a_cache_are_preferred(gateway: Gateway) -> None:
    prompt = range(10 * BLOCK + 1)
    gateway.serve(prompt, "w2")
    first, second, third = WORKERS
    assert gateway.prefer(prompt, (first, third)) is None
    assert gateway.prefer(prompt, (first, replace(second, caches_prefixes=False), third)) is None
    assert gateway.prefer(prompt, (first, replace(second, tiers={}), third)) is None
    assert gateway.prefer(prompt, (second,)) is None, "one worker has no rival"
    assert gateway.prefer(prompt, (first, second)) is not None


def test_nothing_is_kept_of_requests_that_ended_without_a_token_or_with_one_worker(gateway: Gateway) -> None:
    prompt = range(10 * BLOCK + 1)
    request, _ = gateway.put(prompt, WORKERS)
    gateway.affinity.forget(request.id)
    gateway.put(prompt, WORKERS[:1])
    gateway.put(range(BLOCK), WORKERS)
    assert not gateway.affinity._open
    gateway.affinity.on_event(TokenEvent(request.id, EventKind.TOKENS, 0, (5,), worker="w2"))
    assert gateway.prefer(prompt) is None


def test_the_beginnings_used_longest_ago_are_forgotten(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_BEGINNINGS", 6)
    prompts = [range(1000 * n, 1000 * n + 4 * BLOCK + 1) for n in range(4)]  # each has three
    for n in (0, 1, 0, 2):
        gateway.serve(prompts[n], "w2")
    assert [gateway.prefer(prompt) is not None for prompt in prompts[:3]] == [True, False, True]
    assert len(gateway.affinity._uses) == 6
