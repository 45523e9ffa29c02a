"""The fair order of a bulk tier's requests: shares by weight, whoever was there first."""

import heapq
from collections import Counter
from itertools import combinations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import FinishReason
from scheduler.client.fair_order import FairOrder, TokenCosts
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import make_request

DEADLINE_MS = 600_000
COSTS = TokenCosts(prompt_ms=1.0, output_ms=0.0)
WEIGHTS = {"a": 1, "b": 1, "c": 3}


def place(order: FairOrder, request: Request, costs: TokenCosts = COSTS) -> int:
    """Return the request's place, counted from the deadline of one that arrives at `EPOCH_MS`."""
    due_ms = request.arrival_ms + DEADLINE_MS
    return order.place(request, due_ms, costs) - EPOCH_MS - DEADLINE_MS


def of_key(owner: str, number: int, prompt: int = 100, at_ms: int = 0, max_tokens: int = 8) -> Request:
    name, weight = f"{owner}{number}", WEIGHTS[owner]
    times = {"arrival_ms": EPOCH_MS + at_ms, "deadline_ms": EPOCH_MS + at_ms + DEADLINE_MS}
    return make_request(name, "bulk", prompt, max_tokens, owner=owner, weight=weight, **times)


def begin(order: FairOrder, request: Request) -> None:
    order.on_event(TokenEvent(request.id, EventKind.TOKENS, 0, (5,)))


def finish(order: FairOrder, request: Request, num_tokens: int = 1) -> None:
    order.on_event(TokenEvent(request.id, EventKind.FINISHED, 0, (5,) * num_tokens, FinishReason.STOP))


OFFERED = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from("abc"), st.integers(1, 20).map(lambda n: 3 * n)),
    min_size=20,
    max_size=120,
)


@given(OFFERED)
def test_keys_that_wait_all_the_time_get_shares_by_their_weights(offered: list[tuple[int, str, int]]) -> None:
    """Where one server takes the least score, two keys are one request of each apart at most (theorem 1)."""
    order, waiting, now_ms = FairOrder(), list[tuple[int, int, Request]](), 0
    arrivals = sorted(((at, n, of_key(o, n, length, at)) for n, (at, o, length) in enumerate(offered)), reverse=True)
    served = Counter[str]()  # since all keys have waited
    while arrivals or waiting:
        while arrivals and arrivals[-1][0] <= now_ms or not waiting:
            at_ms, number, request = arrivals.pop()
            if not waiting:
                now_ms = max(now_ms, at_ms)
                order.note_empty(EPOCH_MS + DEADLINE_MS + now_ms)
            heapq.heappush(waiting, (place(order, request), number, request))
        present = {request.owner for _, _, request in waiting}
        _, _, request = heapq.heappop(waiting)
        begin(order, request)
        finish(order, request)
        now_ms += len(request.prompt_token_ids)
        if len(present) < 3:
            served.clear()
            continue
        served[request.owner] += len(request.prompt_token_ids)
        for one, other in combinations(WEIGHTS, 2):
            apart = abs(served[one] / WEIGHTS[one] - served[other] / WEIGHTS[other])
            assert apart <= 60 / WEIGHTS[one] + 60 / WEIGHTS[other]


@given(OFFERED)
def test_the_requests_of_one_key_stay_in_order(offered: list[tuple[int, str, int]]) -> None:
    order = FairOrder()
    places = [place(order, of_key("a", n, length, at)) for n, (at, _, length) in enumerate(sorted(offered))]
    assert places == sorted(places)


def test_a_key_that_comes_later_begins_where_the_flood_is() -> None:
    order = FairOrder()
    flood = [of_key("a", n) for n in range(50)]
    assert [place(order, request) for request in flood] == [100 * n for n in range(50)]
    for request in flood[:20]:
        begin(order, request)
    assert [place(order, of_key("b", n, at_ms=500)) for n in range(3)] == [1900, 2000, 2100]


def test_where_nothing_waits_places_are_deadlines_and_nobody_is_behind() -> None:
    """Else those of a key that is always there, and asks for little, would go before what is due sooner."""
    order = FairOrder()
    running = [of_key("a", n) for n in range(9)]
    assert [place(order, request) for request in running][-1] == 800
    order.note_empty(EPOCH_MS + DEADLINE_MS + 500)
    assert place(order, of_key("a", 9, at_ms=501)) == 500
    for request in running:
        finish(order, request)
    assert len(order) == 1
    assert place(order, of_key("b", 0, at_ms=501)) == 500


def test_a_key_that_was_away_has_saved_nothing() -> None:
    order, once = FairOrder(), of_key("b", 0)
    flood = [of_key("a", n) for n in range(50)]
    for request in (once, *flood):
        place(order, request)
    for request in (once, *flood[:20]):
        finish(order, request)
    assert place(order, of_key("b", 1)) == 1900


def test_a_request_that_never_ran_costs_its_key_nothing() -> None:
    order, first = FairOrder(), of_key("a", 0)
    place(order, first)
    for number in range(1, 10):
        refused = of_key("a", number)
        assert place(order, refused) == 100
        order.remove(refused.id)
    begin(order, first)
    order.remove(first.id)
    assert place(order, of_key("a", 10)) == 100, "the first one ran"


def test_answers_count_as_long_as_they_usually_are() -> None:
    """Not as long as they may be: clients often leave `max_tokens` at the most that there is."""
    order, costs = FairOrder(), TokenCosts(prompt_ms=0.0, output_ms=1.0)
    anchor = of_key("b", 0)
    assert place(order, anchor, costs) == 0
    first = of_key("a", 0, max_tokens=4000)
    assert place(order, first, costs) == 0
    assert place(order, of_key("a", 1, max_tokens=4000), costs) == 4000, "nothing is known"
    finish(order, first, num_tokens=50)
    ends_ms = place(order, of_key("a", 2, max_tokens=4000), costs)
    assert place(order, of_key("a", 3, max_tokens=20), costs) == ends_ms + 50
    assert place(order, of_key("a", 4), costs) == ends_ms + 50 + 20
    known = place(order, of_key("c", 1, max_tokens=3000), costs)
    assert place(order, of_key("c", 2), costs) == known + 50 // 3, "another key is taken to be like the others"
    finish(order, anchor, num_tokens=350)
    assert place(order, of_key("a", 5, max_tokens=4000), costs) - place(order, of_key("a", 6), costs) == -50


def test_a_deadline_of_its_own_puts_a_request_before_what_waits_of_its_key() -> None:
    """Alone a key may have any number of them, beside others a few. What it puts later pays for them."""
    order = FairOrder()
    flood = [of_key("a", n) for n in range(6)]
    assert [place(order, request) for request in flood] == [0, 100, 200, 300, 400, 500]
    sooner = [msgspec.structs.replace(of_key("a", n), deadline_ms=EPOCH_MS + 1) for n in range(10, 16)]
    assert [place(order, request) for request in sooner] == [0] * 6
    assert place(order, of_key("a", 20)) == 1200
    order.remove("a10")
    assert place(order, of_key("b", 1)) == 0
    assert place(order, msgspec.structs.replace(of_key("a", 21), deadline_ms=EPOCH_MS + 1)) == 1200
    order.remove("a11")
    order.remove("a12")
    assert place(order, msgspec.structs.replace(of_key("a", 22), deadline_ms=EPOCH_MS + 1)) == 0
