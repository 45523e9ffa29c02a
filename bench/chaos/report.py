"""Judges a run under faults, and makes the record of it. Pure: knows answers and faults, starts nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.chaos.batches import BatchWork
from bench.chaos.faults import Fault
from bench.chaos.job import JobComparison
from bench.chaos.load import LOST, MODELS, Answer
from loadtest.reporting.record import Provenance, Record, Section, Table

RESTART_S = 20.0  # seconds after a gateway was killed or woke up, in which connections to it may still break
RECOVERY_LIMIT_S = 45.0  # seconds after a fault's end, by which each gateway must have answered a new request


@dataclass(frozen=True, slots=True)
class ChaosRun:
    faults: Sequence[Fault]
    answers: Sequence[Answer]
    batches: Sequence[BatchWork]
    leftovers: Mapping[str, str]
    gateways: Sequence[str]
    seed: int
    job: JobComparison | None = None  # None: there was no large job
    is_calm: bool = False  # whether no fault was made on purpose: then no request may fail

    def problems(self) -> list[str]:
        """Return everything that must not be; an empty list if the server has kept its promises."""
        return [
            *(f"{a.kind} at {a.gateway}: {a.problem}" for a in self.answers if a.problem),
            *(f"{a.kind} at {a.gateway}: failed in peace: {a.error}" for a in self.answers if self._fails_in_peace(a)),
            *(f"{a.kind} at {a.gateway}: its connection broke" for a in self.answers if self._is_cut(a)),
            *(f"batch {work.batch_id}: {work.problem}" for work in self.batches if work.problem),
            *(f"left over, {name}: {what}" for name, what in self.leftovers.items()),
            *(f"after {f.kind} of {f.target}: {self._slow(f)}" for f in self.faults if self._slow(f)),
            *([f"the job: {self.job.problem}"] if self.job is not None and self.job.problem else []),
            *self._too_little(),
        ]

    def recovery_s(self, fault: Fault) -> float | None:
        """Return the seconds from the end of a fault until each gateway has answered a request sent since its begin.

        None if a gateway has not answered any.
        """
        firsts = []
        for gateway in self.gateways:
            ends = [a.ended_s for a in self.answers if self._counts(a, gateway) and a.began_s >= fault.began_s]
            if not ends:
                return None
            firsts.append(min(ends))
        return max(0.0, max(firsts) - fault.ended_s)

    def longest_gap_s(self, faults: Sequence[Fault]) -> float:
        """Return the longest gap in a right stream that began during one of `faults`, or ended in it."""
        gaps = [a.longest_gap_s for a in self.answers if a.is_right and any(_meets(a, fault) for fault in faults)]
        return max(gaps, default=0.0)

    def longest_gap_without_fault_s(self) -> float:
        gaps = [a.longest_gap_s for a in self.answers if a.is_right and not any(_meets(a, f) for f in self.faults)]
        return max(gaps, default=0.0)

    @staticmethod
    def _counts(answer: Answer, gateway: str) -> bool:
        return answer.is_right and answer.gateway == gateway and answer.kind != "background"

    def _is_cut(self, answer: Answer) -> bool:
        """Whether a connection broke although nothing was done to its gateway."""
        reasons = (f for f in self.faults if f.breaks_connections_to(answer.gateway))
        excused = any(f.began_s <= answer.ended_s and answer.began_s <= f.ended_s + RESTART_S for f in reasons)
        return answer.error == LOST and not excused

    def _fails_in_peace(self, answer: Answer) -> bool:
        return self.is_calm and answer.error not in ("", MODELS)

    def _slow(self, fault: Fault) -> str:
        seconds = self.recovery_s(fault)
        if seconds is None:
            return "a gateway has answered nothing since"
        return f"answers came only after {seconds:.1f} s" if seconds > RECOVERY_LIMIT_S else ""

    def _too_little(self) -> list[str]:
        """Return the kinds of requests of which none was right: a run that shows nothing must not pass."""
        right = Counter(a.kind for a in self.answers if a.is_right)
        kinds = ("stream", "long stream", "chat", "background")
        missing = [f"no {kind} was answered" for kind in kinds if not right[kind]]
        return [
            *missing,
            *(["no batch was sent"] if not (self.batches or self.job) else []),
            *([] if self.faults or self.is_calm else ["no fault"]),
        ]


def _meets(answer: Answer, fault: Fault) -> bool:
    return answer.gap_began_s <= fault.ended_s and answer.gap_began_s + answer.longest_gap_s >= fault.began_s


def chaos_record(run: ChaosRun) -> Record:
    problems = run.problems()
    gap = f"Longest gap outside of faults: {run.longest_gap_without_fault_s():.2f} s"
    sections = [
        Section("Requests", _requests(run.answers)),
        Section("Faults", _faults(run), notes=(gap,)),
        *([Section("Job", _job(run.job))] if run.job is not None else []),
        Section("Verdict", notes=tuple(problems[:20]) or ("Nothing was lost, repeated, wrong or left over.",)),
    ]
    return Record("Chaos", sections, _data(run, problems), Provenance.of_this_run("tidegate-demo", run.seed))


def _requests(answers: Sequence[Answer]) -> Table:
    rows = []
    for kind in sorted({a.kind for a in answers}):
        mine = [a for a in answers if a.kind == kind]
        errors = Counter(a.error for a in mine if a.error)
        longest_s = max(a.seconds for a in mine)
        named = ", ".join(f"{code} {count}" for code, count in errors.most_common())
        rows.append((kind, str(len(mine)), str(sum(a.is_right for a in mine)), f"{longest_s:.1f}", named or "–"))
    return Table.of(("requests", "sent", "right", "longest s", "errors"), rows)


def _faults(run: ChaosRun) -> Table:
    rows = []
    for name in sorted({_name(fault) for fault in run.faults}):
        faults = [fault for fault in run.faults if _name(fault) == name]
        met = [a for a in run.answers if any(a.began_s <= f.ended_s and a.ended_s >= f.began_s for f in faults)]
        recoveries = [run.recovery_s(fault) for fault in faults]
        known = [seconds for seconds in recoveries if seconds is not None]
        recovery = f"{max(known):.1f}" if len(known) == len(recoveries) else "never"
        right, lost = sum(a.is_right for a in met), sum(a.error == LOST for a in met)
        errors = sum(bool(a.error) for a in met) - lost
        counts = (str(len(faults)), str(right), str(errors), str(lost))
        rows.append((name, *counts, f"{run.longest_gap_s(faults):.2f}", recovery))
    header = ("fault", "times", "right meanwhile", "errors", "broken connections", "longest gap s", "recovery s")
    return Table.of(header, rows)


def _job(job: JobComparison) -> Table:
    equal = "no" if job.problem else "yes"
    row = (str(job.lines), f"{job.calm_s:.0f}", f"{job.killed_s:.0f}", equal)
    return Table.of(("lines", "calm s", "with faults s", "equal"), [row])


def _name(fault: Fault) -> str:
    target = fault.target.partition("-")[0]
    return fault.kind if target in ("all", "store") and fault.kind not in ("kill", "stop") else f"{fault.kind} {target}"


def _data(run: ChaosRun, problems: Sequence[str]) -> dict[str, Any]:
    faults = [{**asdict(fault), "recovery_s": run.recovery_s(fault)} for fault in run.faults]
    return {
        "passed": not problems,
        "problems": list(problems),
        "faults": faults,
        "requests": [asdict(answer) for answer in run.answers],
        "batches": [{"lines": len(work.nonces), "problem": work.problem} for work in run.batches],
        "job": None if run.job is None else asdict(run.job),
        "longest_gap_without_fault_s": run.longest_gap_without_fault_s(),
    }
