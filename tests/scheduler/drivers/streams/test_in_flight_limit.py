from engine.streaming import UpstreamLoad
from scheduler.clock import NEVER_S
from scheduler.drivers.streams.in_flight_limit import DOUBLING_STEPS, MAX_PAUSE_S, InFlightLimit, SlowStart


def test_without_signs_there_is_no_limit_but_the_largest() -> None:
    assert InFlightLimit().value == NEVER_S
    assert InFlightLimit(8).value == 8


def test_a_refusal_lowers_the_limit_once_and_pauses() -> None:
    limit = InFlightLimit()
    limit.note_busy(10, 2.0, now=0.0)
    limit.note_busy(9, 2.0, now=0.1)
    assert 5 <= limit.value < 10
    assert limit.is_paused(2.0) and not limit.is_paused(2.2)


def test_a_server_cannot_stop_the_worker_for_ever() -> None:
    limit = InFlightLimit()
    limit.note_busy(10, 1e9, now=0.0)
    assert not limit.is_paused(MAX_PAUSE_S + 1)


def test_requests_in_the_servers_queue_lower_the_limit_if_they_stay() -> None:
    limit, load = InFlightLimit(), UpstreamLoad(8, 4)
    limit.note_load(load, 12, num_stuck=0, now=0.0)
    limit.note_load(load, 12, num_stuck=0, now=1.0)
    assert limit.value == NEVER_S, "what was sent in the last moment waits for the next step, and for no place"
    limit.note_load(load, 12, num_stuck=5, now=2.0)
    assert limit.value == 8


def test_the_servers_places_bound_the_limit() -> None:
    limit = InFlightLimit()
    limit.note_load(UpstreamLoad(num_places=16), 0, num_stuck=0, now=0.0)
    assert limit.value == 16
    for second in range(40):
        limit.grow(16, now=float(second))
    assert limit.value == 16
    limit = InFlightLimit(8)
    limit.note_load(UpstreamLoad(num_places=16), 0, num_stuck=0, now=0.0)
    assert limit.value == 8


def test_a_server_with_more_places_than_before_gets_more_requests() -> None:
    limit, values = InFlightLimit(), []
    for second, num_places in enumerate([4, 64, None, 64, 8]):
        limit.note_load(UpstreamLoad(num_places=num_places), 0, num_stuck=0, now=float(second))
        limit.grow(int(limit.value), now=float(second))
        values.append(limit.value)
    assert values == [4, 64, 64, 64, 8], "what it does not say for a moment is as before"


def test_the_limit_rises_while_it_is_in_use() -> None:
    limit = InFlightLimit(20)
    limit.note_busy(10, None, now=0.0)
    low = limit.value
    limit.grow(2, now=1.0)
    assert limit.value == low, "not in use"
    for second in range(2, 40):
        limit.grow(int(limit.value), now=float(second))
    assert limit.value == 20


def test_the_slow_start_doubles_when_steps_of_as_many_streams_were_seen() -> None:
    start = SlowStart()
    for _ in range(DOUBLING_STEPS * 4):
        start.note_step(1)
    assert start.value == 2, "single chats show nothing of two streams"
    for num_decodes in (2, 4, 7):
        for _ in range(DOUBLING_STEPS):
            start.note_step(num_decodes)
    assert start.value == 16


def test_the_slow_start_ends_before_a_server_that_shows_no_steps() -> None:
    start = SlowStart()
    for half_second in range(100):
        start.review(1, now=half_second / 2)
    assert start.value == 2, "it is not in use"
    for half_second in range(100):
        start.review(8, now=half_second / 2)
    assert start.value == 16
