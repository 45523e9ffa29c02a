"""What NVIDIA's driver says of the worker's GPUs, for its heartbeat.

Needs nvidia-ml-py (`pip install 'tidegate[gpu]'`) and a driver; without them, nothing is said. Does not import torch.
"""

import asyncio
import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from scheduler.registry.worker_status import GpuStatus
from scheduler.worker.heartbeat import ReadGpus

log = structlog.get_logger()


def gpu_reader(device: str, index: int | None = None, environment: Mapping[str, str] = os.environ) -> ReadGpus | None:
    """Return what reads the GPUs of an engine; None if it uses none, or nothing can be known of them.

    `device` is the engine's own name of its device: "cpu", or the name of a GPU, such as "NVIDIA H200". `index` is the
    only one of the visible GPUs that it uses; None: all of them.
    """
    if device == "cpu":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.info("nothing is known of the GPU's load", hint="pip install 'tidegate[gpu]'")
        return None
    try:
        nvml.nvmlInit()
        handles = _visible(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        handles = handles if index is None else handles[index : index + 1]
    except nvml.NVMLError as error:
        log.info("nothing is known of the GPU's load", reason=str(error))
        return None
    return _LastReading(nvml, handles)


class _LastReading:
    """The last reading of the GPUs. Each call begins a new one on a thread: a driver that hangs holds up nothing."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._last = _read(nvml, handles)
        self._reading: asyncio.Future[tuple[GpuStatus, ...]] | None = None

    def __call__(self) -> tuple[GpuStatus, ...]:
        if self._reading is None or self._reading.done():
            if self._reading is not None:
                self._last = self._reading.result()
            self._reading = asyncio.get_running_loop().run_in_executor(None, _read, self._nvml, self._handles)
        return self._last


def _visible(nvml: Any, chosen: str | None) -> list[Any]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; all of them if it is not set.

    Without CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA's indexes may differ from the driver's where GPUs of several kinds are
    in one machine.
    """
    if chosen is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _read(nvml: Any, handles: list[Any]) -> tuple[GpuStatus, ...]:
    """Return what the driver says now. A GPU that it has lost is left out."""
    found = []
    for handle in handles:
        with suppress(nvml.NVMLError):
            name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
            name = name.decode() if isinstance(name, bytes) else name
            used_mb, total_mb = memory.used // 2**20, memory.total // 2**20
            found.append(GpuStatus(name, used_mb, total_mb, _busy(nvml, handle)))
    return tuple(found)


def _busy(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except nvml.NVMLError:  # such as for a part of a GPU (MIG)
        return None
