"""Who gives way to whom."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.preemption import MAX_PREEMPTIONS, growth_victims, newcomer_victims
from scheduler.states import RequestState
from tests.scheduler.builders import make_decode, make_state

TIERS = ("realtime", "bulk", "batch")


def ids(states: list[RequestState]) -> list[str]:
    return [s.id for s in states]


def test_lowest_tier_first_then_the_newest() -> None:
    """Trap 5."""
    resident = [
        make_decode("bulk old", "bulk", claimed_s=1),
        make_decode("batch old", "batch", claimed_s=2),
        make_decode("bulk new", "bulk", claimed_s=3),
        make_decode("batch new", "batch", claimed_s=4),
    ]
    order = ["batch new", "batch old", "bulk new", "bulk old"]
    assert ids(newcomer_victims(make_state("rt"), resident)) == order


def test_what_is_nearly_done_is_spared_within_its_tier() -> None:
    """Trap 5."""
    nearly = make_decode("nearly done", output=90, max_tokens=100, claimed_s=9)
    fresh = make_decode("fresh", output=5, max_tokens=100, claimed_s=1)
    assert ids(newcomer_victims(make_state("rt"), [nearly, fresh])) == ["fresh", "nearly done"]


def test_a_newcomer_takes_only_from_strictly_lower_tiers() -> None:
    """Trap 1."""
    resident = [make_decode("same", "bulk"), make_decode("above", "realtime"), make_decode("below", "batch")]
    assert ids(newcomer_victims(make_state("new", "bulk"), resident)) == ["below"]


def test_nobody_loses_its_kv_to_newcomers_more_than_a_few_times() -> None:
    """Trap 3."""
    worn = make_decode("worn", preempted=MAX_PREEMPTIONS)
    assert newcomer_victims(make_state("rt"), [worn]) == []
    assert ids(growth_victims(make_decode("rt", "realtime"), [worn])) == ["worn"]


def test_growth_takes_from_newer_equals_and_from_below() -> None:
    needy = make_decode("needy", deadline_ms=5)
    resident = [
        make_decode("older", deadline_ms=4),
        make_decode("newer", deadline_ms=6),
        make_decode("below", "batch", deadline_ms=1),
        make_decode("above", "realtime", deadline_ms=9),
    ]
    assert ids(growth_victims(needy, resident)) == ["below", "newer"]


SEQUENCES = st.builds(
    lambda i, tier, deadline: make_decode(f"s{i}", tier, deadline_ms=deadline),
    st.integers(0, 10**6),
    st.sampled_from(TIERS),
    st.integers(1, 5),
)


@given(SEQUENCES, SEQUENCES)
def test_no_two_sequences_may_evict_each_other(one: RequestState, other: RequestState) -> None:
    for choose in (newcomer_victims, growth_victims):
        assert not (choose(one, [other]) and choose(other, [one]))
