"""What a program writes to stderr, where that is a terminal and where it is not."""

import os
import pty
import subprocess
import sys
from pathlib import Path


def stderr_of(program: str, cwd: Path, *, on_terminal: bool) -> str:
    """Run `program`, a Python program, with `cwd` as its directory, and return what it writes to stderr."""
    argv = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "120"}
    if not on_terminal:
        return subprocess.run(argv, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stderr
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(argv, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        text = b""
        try:
            while part := terminal.read(4096):
                text += part
        except OSError:  # Linux says so at the end of a terminal
            pass
        assert process.wait(60) == 0, text.decode()
    return text.decode()
