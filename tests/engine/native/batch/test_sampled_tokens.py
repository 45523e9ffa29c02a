"""Sampled tokens are copied on the stream of their own device, and errors of the device reach whoever waits."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.native.batch.sampled_tokens import SampledTokens


class FakeEvent:
    """An event that notes the stream on which it is recorded, and fails if `error` is set."""

    streams: list[object] = []
    error: Exception | None = None

    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: object) -> None:
        self.streams.append(stream)

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


def on_second_gpu(waiter: ThreadPoolExecutor) -> SampledTokens:
    with FakeTensorMode():
        return SampledTokens(torch.empty(3, dtype=torch.int64, device="cuda:1"), waiter)


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


def test_tokens_on_the_host_are_known_at_once(waiter: ThreadPoolExecutor) -> None:
    tokens, calls = SampledTokens(torch.tensor([4, -1]), waiter), list[bool]()
    tokens.call_when_known(lambda: calls.append(True))
    assert (tokens.are_known, tokens.wait(), calls) == (True, [4, None], [True])
