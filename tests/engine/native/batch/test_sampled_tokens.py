"""Sampled tokens are copied on the stream of their own device, and errors of the device reach whoever waits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.native.batch.sampled_tokens import SampledTokens, moment_on


class FakeEvent:
    """An event that notes the stream on which it is recorded, and fails if `error` is set.

    Each is 12 ms later than the one before it.
    """

    streams: list[object] = []
    error: Exception | None = None

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing and blocking

    def record(self, stream: object) -> None:
        self.streams.append(stream)
        self.number = len(self.streams)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 12.0 * (later.number - self.number)

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    class Event(FakeEvent):
        streams = []

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return Event


@pytest.fixture
def waiter() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def on_second_gpu(waiter: ThreadPoolExecutor, begun: Any = None) -> SampledTokens:
    with FakeTensorMode():
        return SampledTokens(torch.empty(3, dtype=torch.int64, device="cuda:1"), waiter, begun)


def test_the_copy_is_awaited_on_the_stream_of_the_tokens_own_device(event: Any, waiter: ThreadPoolExecutor) -> None:
    on_second_gpu(waiter)
    assert event.streams == ["stream of cuda:1"]


def test_an_error_of_the_device_calls_the_callback_and_is_raised_by_wait(
    event: Any, waiter: ThreadPoolExecutor
) -> None:
    event.error = RuntimeError("an illegal memory access")
    tokens, calls = on_second_gpu(waiter), list[bool]()
    tokens.call_when_known(lambda: calls.append(tokens.are_known))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tokens.wait()
    waiter.shutdown()
    assert calls == [True]


def test_the_device_tells_how_long_it_took(event: Any, waiter: ThreadPoolExecutor) -> None:
    begun = moment_on(torch.device("cuda:1"))
    first = on_second_gpu(waiter, begun)
    on_second_gpu(waiter)  # launched before anyone waits for the first step
    assert first.device_s() == 0.012


def test_tokens_on_the_host_are_known_at_once(waiter: ThreadPoolExecutor) -> None:
    tokens, calls = SampledTokens(torch.tensor([4, -1]), waiter), list[bool]()
    tokens.call_when_known(lambda: calls.append(True))
    assert (tokens.are_known, tokens.wait(), calls) == (True, [4, None], [True])
    assert tokens.device_s() is None
