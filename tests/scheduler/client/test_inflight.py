"""What a gateway has under way: exact through every way in and out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import FinishReason
from scheduler.client.inflight import MIN_SAMPLES, InFlight, TierUsage
from scheduler.request import Delivery, EventKind, TokenEvent
from tests.scheduler.builders import make_request

TIERS = ("realtime", "bulk")


def token(request_id: str, index: int = 0, cached: int = 0) -> TokenEvent:
    return TokenEvent(request_id, EventKind.TOKENS, index, (5,), cached_tokens=cached)


def last(request_id: str, kind: EventKind = EventKind.FINISHED, index: int = 0, count: int = 1) -> TokenEvent:
    return TokenEvent(request_id, kind, index, (5,) * count, FinishReason.STOP)


def test_a_request_waits_until_its_first_event_and_is_open_until_its_last() -> None:
    flight = InFlight()
    flight.add([make_request("a", prompt=30), make_request("b", "bulk", prompt=50)])
    assert (flight.num_open("realtime"), flight.unanswered_tokens(["realtime"])) == (1, 30)
    assert flight.unanswered_tokens(TIERS) == 80
    flight.on_event(token("a"))
    assert (flight.num_open("realtime"), flight.unanswered_tokens(TIERS)) == (1, 50)
    flight.on_event(last("a", index=1))
    flight.remove("b")
    assert [flight.num_open(t) for t in TIERS] == [0, 0] and flight.unanswered_tokens(TIERS) == 0


@pytest.mark.trap(15)
def test_trap_15_each_of_n_choices_is_open_and_has_its_prompt() -> None:
    flight = InFlight()
    flight.add([make_request(f"r-{n}", prompt=30) for n in range(8)])
    assert (flight.num_open("realtime"), flight.unanswered_tokens(["realtime"])) == (8, 240)


def test_an_answer_that_comes_in_one_piece_says_nothing_while_it_waits() -> None:
    flight = InFlight()
    flight.add([make_request("a", prompt=30, delivery=Delivery.AT_END)])
    assert (flight.num_open("realtime"), flight.unanswered_tokens(["realtime"])) == (1, 0)


def test_habits_are_shares_of_tokens_once_enough_was_seen() -> None:
    flight = InFlight()
    for n in range(MIN_SAMPLES):
        assert flight.usage("realtime") == TierUsage(0.0, None)
        flight.add([make_request(f"r{n}", prompt=100, max_tokens=40)])
        flight.on_event(token(f"r{n}", cached=25))
        flight.on_event(last(f"r{n}", index=1, count=9))
    usage = flight.usage("realtime")
    assert (round(usage.cached_share, 6), usage.output_share) == (0.25, 0.25)
    assert flight.usage("bulk") == TierUsage(0.0, None)


IDS = st.sampled_from("abcd")
moves = st.one_of(
    st.tuples(st.just("enter"), IDS, st.sampled_from(TIERS), st.integers(1, 9)),
    st.tuples(st.just("token"), IDS),
    st.tuples(st.just("leave"), IDS),
    st.tuples(st.just("end"), IDS, st.sampled_from([EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED])),
)


@given(st.lists(moves, max_size=40))
def test_the_sums_are_those_of_what_is_there(done: list[tuple]) -> None:  # type: ignore[type-arg]
    flight = InFlight()
    there: dict[str, tuple[str, int]] = {}
    waits: set[str] = set()
    for name, request_id, *rest in done:
        match name:
            case "enter":
                tier, prompt = rest
                flight.add([make_request(request_id, tier, prompt=prompt)])
                if request_id not in there:
                    there[request_id] = (tier, prompt)
                    waits.add(request_id)
            case "token":
                flight.on_event(token(request_id))
                waits.discard(request_id)
            case _:
                flight.remove(request_id) if name == "leave" else flight.on_event(last(request_id, rest[0]))
                there.pop(request_id, None)
                waits.discard(request_id)
        for tier in TIERS:
            assert flight.num_open(tier) == sum(t == tier for t, _ in there.values())
            assert flight.unanswered_tokens([tier]) == sum(p for i, (t, p) in there.items() if t == tier and i in waits)


def test_of_what_has_begun_what_is_due_by_a_deadline_is_told_from_what_is_due_later() -> None:
    flight = InFlight()
    flight.add([make_request(f"b{i}", "bulk", 10, 5, deadline_ms=1000 * i) for i in (1, 2, 3)])
    flight.add([make_request("rt", "realtime", 10, 5, deadline_ms=1)])
    assert flight.due_by("bulk", 2000) == (0, 0), "what waits counts with the put"
    for request_id in ("b1", "b2", "b3", "rt"):
        flight.on_event(TokenEvent(request_id, EventKind.TOKENS, 0, (7,)))
    assert flight.due_by("bulk", 2000) == (20, 10)
    flight.remove("b1")
    assert flight.due_by("bulk", 2000) == (10, 5)
