"""One engine of each kind for all tests of the contract; a test leaves it without sequences.

Tests keep apart by salts: what one test leaves in the prefix cache, no other finds.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineStartError
from engine.interface import NewSequence
from tests.engine.contract.checked_engine import CheckedEngine
from tests.engine.contract.engines import ENGINES, MADE_UP, ROUNDED, write_model
from tests.engine.drive import make_new

MakeNew = Callable[..., NewSequence]
_salts = count()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of the contract's model, and the same model in transformers."""
    directory = tmp_path_factory.mktemp("contract")
    return directory, write_model(directory)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        yield runner


@pytest.fixture(scope="session")
def built(model: tuple[Path, Any], runner: asyncio.Runner) -> Iterator[Callable[[str], CheckedEngine]]:
    """Return a function that gives the engine of a name, and builds it the first time."""
    engines: dict[str, CheckedEngine] = {}
    failed: dict[str, EngineStartError] = {}

    def get(name: str) -> CheckedEngine:
        if name in failed:
            pytest.fail(f"it did not start: {failed[name]}", pytrace=False)
        if name not in engines:
            try:
                engines[name] = CheckedEngine(ENGINES[name][0](model[0]), runner)
            except EngineStartError as error:
                failed[name] = error
                raise
        return engines[name]

    yield get
    for engine in engines.values():
        engine.engine.close()


def _lent(engine: CheckedEngine) -> Iterator[CheckedEngine]:
    yield engine
    engine.abort_all()


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, marks) in ENGINES.items()])
def engine(request: pytest.FixtureRequest, built: Callable[[str], CheckedEngine]) -> Iterator[CheckedEngine]:
    yield from _lent(built(request.param))


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, marks) in ENGINES.items() if name not in MADE_UP])
def computing_engine(request: pytest.FixtureRequest, built: Callable[[str], CheckedEngine]) -> Iterator[CheckedEngine]:
    """An engine that computes a model."""
    yield from _lent(built(request.param))


@pytest.fixture
def transformers_engine(computing_engine: CheckedEngine, request: pytest.FixtureRequest) -> CheckedEngine:
    """An engine that computes a model as transformers does."""
    if request.node.callspec.params["computing_engine"] in ROUNDED:
        pytest.skip("this engine rounds keys and values")
    return computing_engine


@pytest.fixture
def new() -> MakeNew:
    """`make_new` with a salt of the test's own, so that only its sequences share a prefix."""
    return partial(make_new, cache_salt=f"test-{next(_salts)}")
