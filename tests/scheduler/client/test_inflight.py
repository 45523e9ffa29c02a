"""Requests in flight: the sums stay exact however requests begin and end."""

from hypothesis import given
from hypothesis import strategies as st

from engine.interface import FinishReason
from scheduler.client.inflight import InFlight, TierUsage
from scheduler.request import Delivery, EventKind, TokenEvent
from tests.scheduler.builders import make_request

TIERS = ("realtime", "bulk")


def token(request_id: str, index: int = 0, cached: int = 0) -> TokenEvent:
    return TokenEvent(request_id, EventKind.TOKENS, index, (5,), cached_tokens=cached)


def last(request_id: str, kind: EventKind = EventKind.FINISHED, index: int = 0, count: int = 1) -> TokenEvent:
    return TokenEvent(request_id, kind, index, (5,) * count, FinishReason.STOP)


def test_a_request_delivered_at_its_end_does_not_count_as_unanswered() -> None:
    in_flight = InFlight()
    in_flight.add([make_request("a", prompt=30, delivery=Delivery.AT_END)])
    assert (in_flight.num_open("realtime"), in_flight.unanswered_tokens(["realtime"])) == (1, 0)


def test_usage_is_that_of_the_requests_that_ended() -> None:
    in_flight = InFlight()
    assert in_flight.usage("realtime") == TierUsage(0.0, None)
    for n in range(8):
        in_flight.add([make_request(f"r{n}", prompt=100, max_tokens=40)])
        in_flight.on_event(token(f"r{n}", cached=25))
        in_flight.on_event(last(f"r{n}", index=1, count=9))
    usage = in_flight.usage("realtime")
    assert (round(usage.cached_share, 6), usage.output_share) == (0.25, 0.25)
    assert in_flight.usage("bulk") == TierUsage(0.0, None)


def test_ahead_of_a_key_are_as_many_of_each_other_as_it_has_itself() -> None:
    in_flight = InFlight()
    in_flight.add([make_request(f"a{n}", prompt=10, owner="a") for n in range(100)])
    in_flight.add([make_request(f"b{n}", prompt=10, owner="b") for n in range(6)])
    assert in_flight.ahead("realtime", "a", 1, few=4) == (106, 1060)
    assert in_flight.ahead("realtime", "b", 1, few=4) == (7 + 6, 70 + 60)
    assert in_flight.ahead("realtime", "c", 1, few=4) == (4 + 4, 40 + 40)
    for n in range(6):
        in_flight.remove(f"b{n}")
    assert in_flight.ahead("realtime", "c", 1, few=4) == (4, 40)


def test_what_is_ahead_of_a_key_is_in_proportion_to_the_weights() -> None:
    in_flight = InFlight()
    in_flight.add([make_request(f"a{n}", prompt=10, owner="a", weight=3) for n in range(100)])
    in_flight.add([make_request(f"b{n}", prompt=10, owner="b") for n in range(9)])
    assert in_flight.ahead("realtime", "b", 1, few=4) == (4 + 3 * 6 + 9, 40 + 180 + 90)
    assert in_flight.ahead("realtime", "c", 3, few=4) == (4 + 4, 40 + 40)


IDS = st.sampled_from("abcd")
moves = st.one_of(
    st.tuples(st.just("enter"), IDS, st.sampled_from(TIERS), st.integers(1, 9)),
    st.tuples(st.just("token"), IDS),
    st.tuples(st.just("leave"), IDS),
    st.tuples(st.just("end"), IDS, st.sampled_from([EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED])),
)


@given(st.lists(moves, max_size=40))
def test_the_sums_are_those_of_the_open_requests(done: list[tuple]) -> None:  # type: ignore[type-arg]
    in_flight = InFlight()
    there: dict[str, tuple[str, int]] = {}
    waits: set[str] = set()
    for name, request_id, *rest in done:
        match name:
            case "enter":
                tier, prompt = rest
                in_flight.add([make_request(request_id, tier, prompt=prompt)])
                if request_id not in there:
                    there[request_id] = (tier, prompt)
                    waits.add(request_id)
            case "token":
                in_flight.on_event(token(request_id))
                waits.discard(request_id)
            case _:
                in_flight.remove(request_id) if name == "leave" else in_flight.on_event(last(request_id, rest[0]))
                there.pop(request_id, None)
                waits.discard(request_id)
        for tier in TIERS:
            assert in_flight.num_open(tier) == sum(t == tier for t, _ in there.values())
            assert in_flight.unanswered_tokens([tier]) == sum(
                p for i, (t, p) in there.items() if t == tier and i in waits
            )


def test_due_by_counts_running_requests_up_to_a_deadline() -> None:
    in_flight = InFlight()
    in_flight.add([make_request(f"b{i}", "bulk", 10, 5, deadline_ms=1000 * i) for i in (1, 2, 3)])
    in_flight.add([make_request("rt", "realtime", 10, 5, deadline_ms=1)])
    assert in_flight.due_by("bulk", 2000) == (0, 0), "the queue counts waiting requests during the put"
    for request_id in ("b1", "b2", "b3", "rt"):
        in_flight.on_event(TokenEvent(request_id, EventKind.TOKENS, 0, (7,)))
    assert in_flight.due_by("bulk", 2000) == (20, 10)
    in_flight.remove("b1")
    assert in_flight.due_by("bulk", 2000) == (10, 5)
