"""Child processes that cannot outlive this one, whatever ends it.

Linux only (`PR_SET_PDEATHSIG`); elsewhere a child is ended by its supervisor's clean exit alone.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def dies_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the child gets SIGKILL when the *thread* that started it ends, so start children from
    the main thread. Everything it needs is resolved here, before the fork: between fork and exec only system
    calls are safe."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return bind
