"""Marks for parametrized tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_full(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases, tuples or single values, as parameters. Only those in `quick` run in `make test`."""
    left, parameters = list(quick), []
    for case in cases:
        is_quick = case in left
        if is_quick:
            left.remove(case)
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=() if is_quick else pytest.mark.full))
    assert not left, f"no such cases: {left}"
    return parameters
