"""Whose fault it is that an endpoint is busy."""

import math

from scheduler.drivers.calls.busy_spells import BusySpells, Verdict

KEEP, SET_APART, BLAME = Verdict.KEEP, Verdict.SET_APART, Verdict.BLAME


def test_tasks_keep_their_places_for_a_while_and_are_set_apart_then() -> None:
    spells = BusySpells()
    assert [spells.judge(False, 4, 30.0, now) for now in (0.0, 29.0, 30.0, 31.0)] == [KEEP, KEEP, SET_APART, KEEP]
    assert [spells.judge(True, 2, 30.0, now) for now in (40.0, 70.0)] == [KEEP, SET_APART]


def test_a_served_call_ends_the_spell_of_its_kind() -> None:
    spells = BusySpells()
    assert spells.judge(False, 4, 30.0, 0.0) is KEEP
    spells.note_served(is_isolated=True)
    assert spells.judge(False, 4, 30.0, 30.0) is SET_APART
    spells.judge(False, 4, 30.0, 31.0)
    spells.note_served(is_isolated=False)
    assert spells.judge(False, 4, 30.0, 70.0) is KEEP


def test_a_task_alone_is_to_blame_only_if_others_were_served() -> None:
    spells = BusySpells()
    spells.judge(False, 4, 30.0, 0.0)
    assert [spells.judge(True, 1, 30.0, now) for now in (0.0, 30.0, 3000.0)] == [KEEP] * 3, "it is an outage"
    spells.note_served(is_isolated=False)
    assert spells.judge(True, 1, 30.0, 3001.0) is BLAME


def test_one_recovery_blames_one_task_at_most() -> None:
    """The next outage may begin as soon as one call was served."""
    spells = BusySpells()
    spells.note_served(is_isolated=False)
    assert [spells.judge(True, 1, 30.0, now) for now in (0.0, 30.0, 31.0, 9000.0)] == [KEEP, BLAME, KEEP, KEEP]


def test_what_is_always_excused_has_no_end() -> None:
    spells = BusySpells()
    for is_isolated in (False, True):
        assert [spells.judge(is_isolated, 1, math.inf, now) for now in (0.0, 1e9)] == [KEEP, KEEP]
