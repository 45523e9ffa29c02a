"""How many workers the load needs: each part of the need, its bounds, and what holds where something is not known."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client.scale import DueWork, ScaleSignal, scale_signal
from scheduler.queue.base import Backlog
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from tests.scheduler.builders import make_tiers

TIERS = make_tiers(bulk={"deadline_ms": 600_000})
# A worker prefills 1,000 tokens a second, or generates 100.
SPEED = TierCapacity(prefill_tokens_per_s=500.0, whole_prefill_tokens_per_s=1000.0, whole_output_tokens_per_s=100.0)


def worker(used: float = 0.0, *, claimed: int = 0, running: int = 0, **bulk: Any) -> WorkerStatus:
    """A worker of which interactive traffic takes the share `used`, and which holds prompts of `claimed` tokens."""
    realtime = TierStatus(running=running, capacity=replace(SPEED, used_share=used, prompt_tokens=claimed))
    tiers = {name: TierStatus(capacity=replace(SPEED, **bulk)) for name in TIERS.tiers} | {"realtime": realtime}
    return WorkerStatus("w", ("m",), 512, 1000, 0, tiers=tiers)


def signal(
    *workers: WorkerStatus,
    starting: int = 0,
    backlogs: Mapping[str, Backlog] | None = None,
    due: tuple[DueWork, ...] = (),
    has_more: bool = False,
) -> ScaleSignal:
    shares = {"realtime": 0.5, "bulk": 1.0}
    return scale_signal(TIERS.by_priority, workers, starting, backlogs or {}, shares, due, has_more=has_more)


def waiting(tier: str, prompt_tokens: int, output_tokens: int = 0) -> dict[str, Backlog]:
    return {tier: Backlog(1, prompt_tokens, output_tokens)}


def test_without_work_no_worker_is_wanted() -> None:
    assert signal(worker(), worker()).wanted == 0
    assert signal().wanted == 0
    assert signal(worker(used=0.0001)).wanted == 0, "what was used long ago is no load"


@pytest.mark.parametrize(
    "work",
    [
        {"backlogs": waiting("bulk", 10)},
        {"due": (DueWork(3600, 1),)},
        {"has_more": True},
    ],
)
def test_the_least_work_wants_one_worker_from_zero_and_with_one(work: dict[str, Any]) -> None:
    assert signal(**work).wanted == 1
    assert signal(starting=1, **work).wanted == 1, "it is about to come"
    assert signal(worker(), **work).wanted == 1
    assert signal(worker(running=1)).wanted == 1


def test_interactive_traffic_leaves_a_reserve_for_its_bursts() -> None:
    assert signal(worker(0.6)).wanted == 1
    assert signal(worker(0.65)).wanted == 2
    assert signal(*[worker(1.0)] * 3).wanted == 5
    found = signal(worker(1.0))
    assert (found.wanted, found.interactive, found.reason) == (2, 1.0, "interactive traffic keeps the workers busy")


def test_steps_that_are_not_full_want_no_further_worker() -> None:
    busy = worker(0.95)
    alone = replace(busy, interactive_share=0.2)
    assert (signal(alone).wanted, signal(alone).interactive) == (1, 0.2)
    assert signal(busy).wanted == 2, "where it is not known, all the time counts"


def test_bulk_has_what_the_reserve_leaves() -> None:
    """0.5 + 0.3 workers fit into the one that interactive traffic needs for its bursts, and 0.5 + 0.6 do not."""
    assert signal(worker(0.5), due=(DueWork(1000, 300),)).wanted == 1
    assert signal(worker(0.5), due=(DueWork(1000, 600),)).wanted == 2


def test_interactive_requests_that_wait_are_caught_up_with_in_ten_seconds() -> None:
    assert signal(worker(), backlogs=waiting("realtime", 25_000)).wanted == 3
    assert signal(worker(), backlogs=waiting("realtime", 0, 5_000)).wanted == 3, "half of max_tokens is usual"
    assert signal(worker(claimed=25_000, running=1)).wanted == 3, "a worker holds their prompts"
    assert signal(worker(), backlogs=waiting("realtime", 2_000)).wanted == 1


def test_bulk_that_is_due_sooner_goes_first() -> None:
    """Two hours of work in an hour, and then little in a day, need two workers. All of it in a day needs one."""
    assert signal(worker(), due=(DueWork(3600, 7200), DueWork(86_400, 3600))).wanted == 2
    assert signal(worker(), due=(DueWork(86_400, 7200), DueWork(86_400, 3600))).wanted == 1
    assert signal(worker(), worker(), due=(DueWork(3600, 3600),)).wanted == 2, "an hour of both"


def test_late_bulk_wants_no_end_of_workers() -> None:
    assert signal(worker(), due=(DueWork(-100, 120),)).wanted == 2


def test_single_bulk_requests_are_due_at_their_tiers_deadline() -> None:
    assert signal(worker(), backlogs=waiting("bulk", 1_800_000)).wanted == 3


def test_workers_leave_only_when_the_rest_has_more_than_enough() -> None:
    assert signal(*[worker(0.3)] * 4).wanted == 3, "2 are needed, and 2.5 to be sure"
    assert signal(*[worker(0.35)] * 3).wanted == 3, "1.75 are needed, and 2.2 to be sure"
    assert signal(*[worker(0.3)] * 2, starting=3).wanted == 2


def test_it_holds_while_speeds_are_not_known() -> None:
    new = worker(0.9, running=4)
    tiers = {name: replace(status, capacity=None) for name, status in new.tiers.items()}
    assert signal(replace(new, tiers=tiers), starting=1).wanted == 2
    guess = worker(running=1, prefill_tokens_per_s=0.0)
    assert signal(guess).reason == "the workers' speed is not known yet"


def test_a_threefold_step_is_followed_without_turning_back() -> None:
    """Interactive load of 1.2 workers becomes 3.6 at once. Workers take three seconds to start, and share the load."""
    serves_from, counts, seen = [0, 0], list[int](), 1.2
    for second in range(120):
        load = 1.2 if second < 10 else 3.6
        serving = sum(at <= second for at in serves_from)
        seen += 0.1 * (min(load, serving) - seen)  # as heartbeats average it
        behind = int(1000 * max(0.0, load - serving))
        workers = [worker(seen / serving, claimed=behind, running=1)] * serving
        wanted = signal(*workers, starting=len(serves_from) - serving).wanted
        serves_from = serves_from[:wanted] + [second + 3] * (wanted - len(serves_from))
        counts.append(wanted)
    assert counts[:10] == [2] * 10
    assert max(counts[10:13]) > 2, "the first rise comes within two seconds"
    turns = [b - a for a, b in zip(counts, counts[1:], strict=False) if a != b]
    assert sum(a * b < 0 for a, b in zip(turns, turns[1:], strict=False)) <= 1
    assert counts[-1] in (6, 7)


SHARES = st.floats(0, 1)


@given(st.lists(SHARES, min_size=1, max_size=6), st.integers(0, 50_000), st.floats(1, 1e5), st.floats(0, 1e5))
def test_more_work_never_wants_fewer_workers(used: list[float], tokens: int, left_s: float, work_s: float) -> None:
    workers = [worker(share, running=1) for share in used]
    less = signal(*workers, backlogs=waiting("realtime", tokens), due=(DueWork(left_s, work_s),))
    more = signal(*workers, backlogs=waiting("realtime", 2 * tokens), due=(DueWork(left_s, 2 * work_s),))
    assert 1 <= less.wanted <= more.wanted
