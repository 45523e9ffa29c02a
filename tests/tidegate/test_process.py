"""Signals of a process."""

import os
import pty
import signal
import subprocess
import sys

PROGRAM = """
import asyncio
from tidegate.process import hangup_calls, ignore_hangup

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
from tidegate.process import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
print(raise_descriptor_limit(), flush=True)
subprocess.run([sys.executable, "-c", {child!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["512", "(512, 512)"]
