"""The search for the solo goodput: by few probes, in bounded time, and honest about what it saw."""

from collections.abc import Awaitable, Callable

import pytest

from bench.isolation.tuning import Goodput, Probe, find_goodput


def served_up_to(capacity: float) -> Callable[[float], Awaitable[Probe]]:
    async def measure(clients: float) -> Probe:
        return Probe(clients, 40, 0 if clients <= capacity else 20, was_cut=clients > capacity)

    return measure


@pytest.mark.parametrize("capacity", [0.05, 0.3, 0.99, 1.7, 6.0, 40.0])
async def test_the_goodput_is_found_within_a_tenth_and_with_few_runs(capacity: float) -> None:
    found = await find_goodput(served_up_to(capacity))
    assert capacity / 1.1 <= found.clients <= capacity
    assert found.breaks_at is not None and capacity < found.breaks_at <= 1.1 * found.clients
    assert len(found.probes) <= 10


async def test_a_load_that_never_holds_has_no_goodput_and_one_that_always_does_is_bounded() -> None:
    assert (await find_goodput(served_up_to(0.0))).clients == 0.0
    always = await find_goodput(served_up_to(1e9))
    assert (always.clients, always.breaks_at) == (64.0, None)


@pytest.mark.parametrize("probes", [1, 2, 3, 5])
async def test_when_the_time_is_over_what_was_seen_is_the_answer(probes: int) -> None:
    tried: list[float] = []

    async def measure(clients: float) -> Probe:
        tried.append(clients)
        return Probe(clients, 40, 0 if clients <= 1.7 else 20)

    found = await find_goodput(measure, has_time=lambda: len(tried) < probes)
    assert len(found.probes) == probes
    assert found.clients == max(c for c in tried if c <= 1.7)
    assert found.breaks_at == min((c for c in tried if c > 1.7), default=None)


def test_few_requests_show_little() -> None:
    def of(offered: int, missed: int = 0) -> float:
        shown = Goodput(2.0, (Probe(1.0, 9999, 0), Probe(2.0, offered, missed))).at_least
        assert shown is not None
        return shown

    assert of(40) == pytest.approx(0.937, abs=0.001)  # Wilson, one-sided: n ÷ (n + 1.645²)
    assert of(8) < of(40) < of(1000) < 1.0
    assert of(100, 1) == pytest.approx(0.9564, abs=0.0001)
    assert Goodput(0.0, (Probe(1.0, 40, 20),)).at_least is None
