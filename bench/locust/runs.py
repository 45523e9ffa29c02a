"""Two runs of Locust on one server: with continuous batching, and with one sequence at a time.

Both runs have the same users; only the server's tiers differ. Locust runs in its own process, since it replaces sockets
and sleep by those of gevent. Knows Locust's flags and files; does not know what its users do (`loadtest.locustfile`).
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.isolation.admin import put_tiers, wait_until_quiet
from bench.isolation.arms import Document, read_arm_file
from loadtest.child_environment import python_environment
from loadtest.client.http import Target, TargetError
from loadtest.reporting.formats import ABSENT
from loadtest.reporting.record import Card, Drawing, Frame, Provenance, Record, Row, Section, Table

CONTINUOUS, ONE_AT_A_TIME = "continuous batching", "one at a time"
LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
ENTRIES = ("realtime first token", "realtime token gap", "realtime chat", "bulk flex")
HOW = (
    "The same server and the same users; for the second run its tiers hold one sequence in a batch. Locust is a "
    "closed loop: its users wait for their answers, so a slow server is asked less."
)
GRACE_S = 60.0  # seconds that Locust may take beyond the run, for its start, its report and the last answers


@dataclass(frozen=True, slots=True)
class Users:
    """The users of a Locust run: their number, how many start each second, and for how many seconds they run."""

    users: int
    spawn_per_s: float
    seconds: float
    classes: tuple[str, ...] = ("RealtimeUser", "BulkUser")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of Locust's statistics. The quantiles are response times in ms."""

    requests: int
    failures: int
    per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class LocustRun:
    name: str
    entries: dict[str, Entry]
    report_html: str  # the page that Locust writes


async def run_both(target: Target, ours: Document, users: Users, folder: Path) -> list[LocustRun]:
    """Run Locust with continuous batching, then with one sequence at a time. Return both runs.

    Raises `TargetError` if Locust or the server fails.
    """
    runs = []
    for name, tiers in ((CONTINUOUS, ours), (ONE_AT_A_TIME, read_arm_file("one-at-a-time"))):
        await wait_until_quiet(target, 1.0)
        await put_tiers(target, tiers)
        runs.append(await _run(target, name, users, folder))
    return runs


async def _run(target: Target, name: str, users: Users, folder: Path) -> LocustRun:
    stem = folder / name.replace(" ", "-")
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += ["-u", str(users.users), "-r", f"{users.spawn_per_s:g}", "-t", f"{users.seconds:g}s"]
    command += ["--host", f"http://{target.host}:{target.port}", "--json-file", str(stem), "--html", f"{stem}.html"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *users.classes,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=python_environment(1),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), users.seconds + GRACE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    page, stats = Path(f"{stem}.html"), Path(f"{stem}.json")
    # Locust exits with 1 if any request failed. That it did not run at all shows only in its missing files.
    if not page.exists() or not stats.exists():
        raise TargetError(f"Locust made no report: {output.decode(errors='replace')[-400:].strip()}")
    entries = read_entries(json.loads(stats.read_text(encoding="utf-8")))
    return LocustRun(name, entries, page.read_text(encoding="utf-8"))


def read_entries(stats: list[dict[str, Any]]) -> dict[str, Entry]:
    """Return Locust's statistics by name.

    Locust rounds response times before it counts them, so the quantiles are rounded values.
    """
    entries = {}
    for stat in stats:
        times = sorted((float(ms), count) for ms, count in stat["response_times"].items())
        elapsed_s = max(1.0, (stat["last_request_timestamp"] or stat["start_time"]) - stat["start_time"])
        quantiles = (_quantile(times, q) for q in (0.5, 0.95, 0.99))
        requests = stat["num_requests"]
        entries[stat["name"]] = Entry(requests, stat["num_failures"], requests / elapsed_s, *quantiles)
    return entries


def _quantile(times: list[tuple[float, int]], q: float) -> float | None:
    """Return the `q` quantile of sorted (ms, count) pairs: the lowest time that covers a share `q` of all times.

    None if there are no times.
    """
    total, seen = sum(count for _, count in times), 0
    for ms, count in times:
        seen += count
        if seen >= q * total:
            return ms
    return None


def locust_table(runs: list[LocustRun]) -> Table:
    """Return a table with a row for each kind of request in each run. Times are in ms."""
    continuous, one = runs[0].entries, runs[1].entries
    rows = []
    for name in (n for n in ENTRIES if n in continuous or n in one):
        for run in runs:
            entry = run.entries.get(name)
            rows.append(Row((name, run.name, *_cells(entry)), "ours" if run.name == CONTINUOUS else ""))
    header = ("what", "way", "count", "failures", "per s", "p50", "p95", "p99")
    return Table(header, tuple(rows))


def _cells(entry: Entry | None) -> tuple[str, ...]:
    if entry is None:
        return ("0", "0", "0", ABSENT, ABSENT, ABSENT)
    times = (ABSENT if ms is None else f"{ms:,.0f}" for ms in (entry.p50_ms, entry.p95_ms, entry.p99_ms))
    return (str(entry.requests), str(entry.failures), f"{entry.per_s:.1f}", *times)


def answered_per_s(run: LocustRun) -> float:
    """Return the complete answers per second, realtime and bulk together, without failed requests."""
    whole = [run.entries[name] for name in ("realtime chat", "bulk flex") if name in run.entries]
    return sum(e.per_s * (1 - e.failures / e.requests) for e in whole if e.requests)


def locust_record(runs: list[LocustRun], drawing: Drawing, users: Users, provenance: Provenance) -> Record:
    both = Section("Both runs, times in ms", locust_table(runs), explanation=HOW, drawings=(drawing,))
    facts = (
        ("answers per second, continuous ÷ one at a time", _gain(runs)),
        ("users", f"{users.users} ({', '.join(users.classes)}), {users.spawn_per_s:g} more each second"),
        ("each run", f"{users.seconds:g} s"),
    )
    return Record(
        f"Continuous batching against one at a time, {users.users} users",
        sections=(
            both,
            Section("Locust's own reports", frames=tuple(Frame(run.name, run.report_html) for run in runs)),
            Section("How it was run", facts=facts),
        ),
        data={
            "users": asdict(users),
            "runs": {run.name: {name: asdict(e) for name, e in run.entries.items()} for run in runs},
        },
        provenance=provenance,
        cards=_cards(runs),
        kicker="Locust",
    )


def _gain(runs: list[LocustRun]) -> str:
    together, one = (answered_per_s(run) for run in runs)
    return f"{together / one:.2f}" if one else ABSENT


def _cards(runs: list[LocustRun]) -> list[Card]:
    cards = [Card(_gain(runs), "answers per second, continuous ÷ one at a time")]
    for run in runs:
        entry = run.entries.get("realtime first token")
        value = f"{entry.p50_ms:,.0f} ms" if entry and entry.p50_ms is not None else ABSENT
        cards.append(Card(value, f"median first token, {run.name}"))
    return cards
