from typing import Any

from scheduler.drivers.streams.busy_refusals import MAX_REMEMBERED, BusyRefusals
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_request, make_tiers

TIERS = make_tiers()


def state(name: str, tier: str = "bulk", **fields: Any) -> RequestState:
    return RequestState(make_request(name, tier, **fields), TIERS[tier], fence=1, arrived_s=0.0, claimed_s=0.0)


def test_a_request_is_overtaken_by_those_of_its_tier_or_below_only() -> None:
    busy, refused = BusyRefusals(), state("refused")
    busy.note_served(state("early"), 0.5)
    assert not busy.note_refused(refused, 1.0), "the others were sent before"
    busy.note_served(state("chat", "realtime"), 2.0)
    assert not busy.note_refused(refused, 3.0), "interactive requests go first"
    busy.note_served(state("line", "batch"), 3.0)
    assert busy.note_refused(refused, 4.0)


def test_each_wait_is_longer_and_ends() -> None:
    busy, refused, waits_s, now = BusyRefusals(), state("refused", deadline_ms=1 << 60), [], 0.0
    busy.note_refused(refused, now)
    while not busy.is_last(refused, now):
        busy.note_served(state("other"), now)
        assert busy.note_refused(refused, now)
        busy.wait(refused, None, now)
        begun_s = now
        while busy.num_waiting(now) == {"bulk": 1}:
            now += 0.5
        waits_s.append(now - begun_s)
    assert waits_s == sorted(waits_s) and len(waits_s) == TIERS["bulk"].retry.max_attempts + 1


def test_tokens_end_the_count_and_the_names_are_bounded() -> None:
    busy = BusyRefusals()
    for number in range(MAX_REMEMBERED + 1):
        busy.note_refused(state(f"r{number}"), 1.0)
    busy.note_served(state("r1"), 2.0)
    assert not busy.note_refused(state("r0"), 3.0), "the oldest one is forgotten"
    assert not busy.note_refused(state("r1"), 3.0), "it was served meanwhile"
    assert busy.note_refused(state("r9"), 3.0)
