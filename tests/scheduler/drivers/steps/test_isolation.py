"""Which requests may run, and which one runs alone, after workers have died."""

import pytest

from scheduler.drivers.steps.isolation import COHORT, PROVEN_TOKENS
from scheduler.request import Claimed, Lease
from tests.scheduler.builders import make_core, make_info, make_request, make_tiers, ran
from tests.scheduler.stepped_core import SteppedCore


def rig(max_attempts: int = 4) -> SteppedCore:
    info = make_info(num_blocks=2000, max_model_len=1024)
    return SteppedCore(make_core(make_tiers(batch={"retry": {"max_attempts": max_attempts}}), info))


def accept(stepped: SteppedCore, attempts: dict[str, int], **more: object) -> None:
    for fence, (name, attempt) in enumerate(attempts.items(), 1):
        request = make_request(name, "batch", **{"prompt": 1, "max_tokens": 400, **more})  # type: ignore[arg-type]
        stepped.core.held.accept([Claimed(request, fence, attempt)], stepped.now, stepped.wall_ms)


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}{i:02}" for i in range(count)]


def test_in_the_last_attempt_but_one_a_cohort_runs_beside_others_until_it_is_proven() -> None:
    stepped = rig()
    accept(stepped, {**dict.fromkeys(names("suspect", 20), 3), **dict.fromkeys(names("fresh", 5), 1)})
    first = ran(stepped.step())
    assert sorted(first) == names("fresh", 5) + names("suspect", COHORT)
    for _ in range(PROVEN_TOKENS - 1):
        assert sorted(ran(stepped.step())) == sorted(first)
    assert sorted(ran(stepped.step())) == names("fresh", 5) + names("suspect", 2 * COHORT)


def test_an_isolated_request_is_in_no_step_with_others_and_keeps_its_turn_to_its_end() -> None:
    stepped = rig()
    accept(stepped, {"one": 4, "two": 4, "other": 1}, max_tokens=6)
    steps = []
    while not (plan := stepped.step()).is_empty:
        steps.append(sorted(ran(plan)))
    assert all(len(step) == 1 for step in steps)
    assert [step for step in steps if step != ["other"]] == [["one"]] * 6 + [["two"]] * 6
    assert steps[:8] == [["other"]] * 3 + [["one"]] + [["other"]] * 3 + [["one"]]


@pytest.mark.parametrize(("max_attempts", "attempt", "is_isolated"), [(1, 1, False), (2, 2, True), (6, 5, False)])
def test_the_last_of_several_attempts_is_isolated(max_attempts: int, attempt: int, is_isolated: bool) -> None:
    stepped = rig(max_attempts)
    accept(stepped, {"r": attempt})
    assert [state.is_isolated for state in stepped.core.held.states] == [is_isolated]


def test_only_what_may_be_in_a_step_is_not_marked_as_waiting() -> None:
    stepped = rig()
    accept(stepped, {"fresh": 1, **dict.fromkeys(names("suspect", COHORT + 1), 3), "alone": 4})
    waits, alone = stepped.core.isolation.marks()
    assert set(waits.values()) == {True} and "fresh" not in {lease.request_id for lease in waits}
    stepped.step()
    waits, alone = stepped.core.isolation.marks()
    assert alone is None
    assert {lease.request_id for lease, is_waiting in waits.items() if is_waiting} == {f"suspect{COHORT:02}", "alone"}
    while ran(stepped.step()).keys() != {"alone"}:
        pass
    waits, alone = stepped.core.isolation.marks()
    assert isinstance(alone, Lease) and alone.request_id == "alone"
    assert waits[alone] is False


def test_a_suspects_grammar_is_compiled_when_the_suspect_may_run() -> None:
    """Compiling may be what kills the worker, so it is blamed as a step is."""
    stepped = rig()
    grammar = {"grammar": '{"grammars": []}'}
    accept(stepped, dict.fromkeys(names("suspect", COHORT + 2), 3), **grammar)
    compiled: list[str] = []
    while (request := stepped.core.next_to_compile()) is not None:
        compiled.append(request.id)
        stepped.core.note_compiled(request.id, object())
    assert compiled == names("suspect", COHORT)
    waits, _ = stepped.core.isolation.marks()
    assert sum(waits.values()) == COHORT + 2, "those that are compiled have not begun"
    alone = rig()
    accept(alone, {"one": 4, "two": 4}, **grammar)
    assert [request.id for request in (alone.core.next_to_compile(),) if request is not None] == ["one"]
    waits, _ = alone.core.isolation.marks()
    assert {lease.request_id: is_waiting for lease, is_waiting in waits.items()} == {"one": False, "two": True}
