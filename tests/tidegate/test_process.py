"""Signals of a process, and its heap."""

import os
import platform
import pty
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from tidegate.supervision.process import hangup_calls, ignore_hangup

async def main():
    ignore_hangup()
    said, ended = print, asyncio.Event()
    with hangup_calls(lambda: said("reload", flush=True), ended.set):
        said("ready", flush=True)
        await ended.wait()
    said("stopped", flush=True)

asyncio.run(main())
"""


def test_sighup_reloads_or_stops_if_the_terminal_was_closed() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=subprocess.PIPE, text=True)
    os.close(theirs)
    try:
        with process.stdout as said:  # type: ignore[union-attr]
            assert said.readline() == "ready\n"
            process.send_signal(signal.SIGHUP)
            assert said.readline() == "reload\n"
            os.close(ours)
            process.send_signal(signal.SIGHUP)
            assert said.readline() == "stopped\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_limit_of_descriptors_is_raised_for_children_too() -> None:
    child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    program = f"""
import resource, subprocess, sys
from tidegate.supervision.process import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
print(raise_descriptor_limit(), flush=True)
subprocess.run([sys.executable, "-c", {child!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["512", "(512, 512)"]


HEAP = """
import gc, weakref
from tidegate.supervision.process import settle_heap

class Cycle:
    def __init__(self):
        self.itself = self

garbage = weakref.ref(Cycle())
made = [Cycle() for _ in range(1000)]
settle_heap()
print(garbage() is None, not any(isinstance(o, Cycle) for o in gc.get_objects()), gc.isenabled())
later = weakref.ref(Cycle())
gc.collect()
print(later() is None, len(made))
"""


FREE_MEMORY = """
from tidegate.supervision.process import settle_heap

def resident_mb():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) // 1024

made = [bytearray(2000) for _ in range(50_000)]
end = bytearray(2000)  # above the others, so that they do not go back by themselves
del made
before_mb = resident_mb()
settle_heap()
print(before_mb - resident_mb() > 80)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU's C library keeps free memory")
def test_free_memory_goes_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", FREE_MEMORY], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "True\n"


def test_collections_leave_out_what_the_start_has_made_and_still_find_later_garbage() -> None:
    said = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "True True True\nTrue 1000\n"
