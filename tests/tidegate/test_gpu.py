"""What a worker says of its GPUs: with a driver, with one that fails, and without any."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scheduler.registry.worker_status import GpuStatus
from tests.waiting import until
from tidegate.settings.worker import WorkerSettings
from tidegate.worker.engine_worker import _gpu_index
from tidegate.worker.gpu import gpu_reader

NAME = "NVIDIA H100 80GB HBM3"  # what engines on CUDA give as their device


class NVMLError(Exception):
    pass


class Driver(ModuleType):
    """A driver of two GPUs, in the place of nvidia-ml-py."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.used_mb = 1000
        self.lost: set[str] = set()

    def nvmlInit(self) -> None:
        if "all" in self.lost:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        if handle in self.lost:
            raise NVMLError("GPU is lost")
        return f"NVIDIA {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=self.used_mb * 2**20, total=8000 * 2**20)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle == "GPU-1":
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=37)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    yield driver


async def test_all_gpus_are_read_and_read_again(driver: Driver) -> None:
    read = gpu_reader(NAME, environment={})
    assert read is not None
    assert read() == (GpuStatus("NVIDIA GPU-0", 1000, 8000, 0.37), GpuStatus("NVIDIA GPU-1", 1000, 8000, None))
    driver.used_mb = 2000
    await until(lambda: read()[0].memory_used_mb == 2000)
    driver.lost.add("GPU-0")
    await until(lambda: [gpu.name for gpu in read()] == ["NVIDIA GPU-1"])


@pytest.mark.parametrize(("chosen", "names"), [("1", ["GPU-1"]), ("GPU-abc, 0", ["GPU-abc", "GPU-0"]), ("", [])])
async def test_only_visible_gpus_are_read(driver: Driver, chosen: str, names: list[str]) -> None:
    read = gpu_reader(NAME, environment={"CUDA_VISIBLE_DEVICES": chosen})
    assert read is not None
    assert [gpu.name for gpu in read()] == [f"NVIDIA {name}" for name in names]


@pytest.mark.parametrize(("device", "name"), [("auto", "GPU-0"), ("cuda", "GPU-0"), ("cuda:1", "GPU-1")])
async def test_a_worker_of_our_own_engine_reads_the_gpu_that_it_uses(driver: Driver, device: str, name: str) -> None:
    settings = WorkerSettings(redis_url="redis://127.0.0.1:1", device=device)
    read = gpu_reader(NAME, _gpu_index(settings), {})
    assert read is not None
    assert [gpu.name for gpu in read()] == [f"NVIDIA {name}"]
    assert _gpu_index(settings.model_copy(update={"engine": "vllm"})) is None


def test_a_cpu_has_none(driver: Driver) -> None:
    assert gpu_reader("cpu", environment={}) is None


def test_without_a_driver_or_its_package_nothing_is_said(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.lost.add("all")
    assert gpu_reader(NAME, environment={}) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_reader(NAME, environment={}) is None
