"""The sixteen traps that other systems of this kind fell into: each is guarded by tests marked `@pytest.mark.trap(n)`.

Whoever removes the last test of a trap has to say what guards it instead.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

TRAPS = {
    1: "equal priorities evict each other every step",
    2: "evicting for a newcomer that cannot start in this step",
    3: "a queue limit that kills preempted work",
    4: "admission counted too late: a burst slips through",
    5: "the wrong victim",
    6: "evicting again before the freed space is visible",
    7: "a saturation gate that also stops interactive work",
    8: "a stale signal taken for news",
    9: "strict priority that starves bulk",
    10: "a backlog hidden in the engine",
    11: "steering on p99 behind a sharp knee",
    12: "priorities as bare numbers",
    13: "a queue kept as one value",
    14: "a resume that loses state",
    15: "n > 1 counted as one",
    16: "exit code 0 of a dead engine",
}


def _marks() -> Iterator[tuple[int, str]]:
    """The trap and the name of each test that is marked with one."""
    sources = (path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    for source in sources:
        for node in ast.walk(ast.parse(source)) if "pytest.mark.trap" in source else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trap":
                        yield from ((ast.literal_eval(number), node.name) for number in mark.args)


MARKED = sorted(_marks())


@pytest.mark.parametrize("number", TRAPS)
def test_a_trap_is_guarded_by_tests_that_name_it(number: int) -> None:
    assert [name for trap, name in MARKED if trap == number], TRAPS[number]


def test_no_test_names_a_trap_that_is_not_listed() -> None:
    assert {number for number, _ in MARKED} <= set(TRAPS)
