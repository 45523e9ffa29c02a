"""Small processes that write what happens to them into a journal: parts for tests of the supervisor."""

import sys
from pathlib import Path

from tidegate.supervision.keeper import Part, Stage

# Usage: NAME JOURNAL BEHAVIOUR. Writes "start NAME PID" when it runs and "stop NAME PID" on SIGTERM. SIGUSR1 ends it
# with the exit code of a part that cannot start. With the behaviour "reload", SIGHUP writes "reload NAME PID".
CHILD = """
import os, signal, sys
name, journal, behaviour = sys.argv[1:]

def note(event):
    with open(journal, "a") as file:
        file.write(f"{event} {name} {os.getpid()}\\n")

awaited = {signal.SIGTERM, signal.SIGUSR1}
if behaviour == "reload":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    awaited.add(signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
note("start")
if behaviour.startswith("exit"):
    sys.exit(int(behaviour.split()[1]))
stops = 0
while True:
    number = signal.sigwait(awaited)
    if number == signal.SIGUSR1:
        sys.exit(78)
    if number == signal.SIGHUP:
        note("reload")
        continue
    note("stop")
    stops += 1
    if behaviour in ("serve", "reload") or (behaviour == "serve on" and stops == 2):
        sys.exit(0)
    if behaviour == "end badly":
        sys.exit(3)
"""


class Journal:
    """The lines that the children wrote, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def events(self) -> list[str]:
        return [f"{event} {name}" for event, name, _ in self.lines()]

    def pids(self, name: str) -> list[int]:
        return [int(pid) for event, who, pid in self.lines() if (event, who) == ("start", name)]

    def count(self, event: str) -> int:
        return self.events().count(event)

    def part(self, name: str, stage: Stage = Stage.WORKER, behaviour: str = "serve") -> Part:
        async def ready() -> bool:
            return not behaviour.startswith("exit") and bool(self.pids(name))

        argv = (sys.executable, "-S", "-E", "-c", CHILD, name, str(self.path), behaviour)
        return Part(name, stage, argv, ready=ready)
