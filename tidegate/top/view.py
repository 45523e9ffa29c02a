"""The screen of `tidegate top`: tables made of the object of GET /admin/overview. Knows no HTTP and no keys."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNKNOWN = "–"
TIER_COLUMNS = ("waiting", "for", "claimed", "running", "ended/s", "TTFT p99", "SLO", "gap p99", "SLO", "met")
BAR_CELLS = 10
HIGH = 0.9  # share of KV blocks or of a GPU's memory from which it is shown as scarce


def screen(overview: Mapping[str, Any], url: str) -> Group:
    parts: list[RenderableType] = [_header(overview, url), _tiers(overview["tiers"]), _workers(overview["workers"])]
    if overview["batches"]:
        parts.append(_batches(overview["batches"]))
    return Group(*parts)


def notice(text: str, url: str) -> Group:
    """Return the screen while there is nothing else to show."""
    return Group(Text.assemble(("Tidegate ", "bold"), url), Text(text, style="red"))


def _header(overview: Mapping[str, Any], url: str) -> Text:
    store, at = overview["store"], datetime.fromtimestamp(overview["at_ms"] / 1000)
    models = overview["models"]
    place = f" ({models.index(overview['model']) + 1} of {len(models)})" if len(models) > 1 else ""
    line = Text.assemble(
        ("Tidegate ", "bold"),
        f"{url}  {at:%H:%M:%S}  ",
        f"{overview['model']}{place}  {overview['open_requests']} open requests  store ",
    )
    if not store["answers"]:
        line.append("does not answer", style="bold red")
    elif store["refusal"] is not None:
        line.append(f"refuses writes: {store['refusal']}", style="bold red")
    else:
        line.append(f"{store['latency_ms']:.1f} ms", style="green")
    if overview["draining"]:
        line.append("  draining", style="yellow")
    return line


def _tiers(tiers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("tier", *TIER_COLUMNS)
    for name, tier in tiers.items():
        slo = tier["slo"]
        table.add_row(
            Text(name, style="bold red" if tier["overloaded"] else "bold"),
            _number(tier["waiting"]),
            _duration(tier["head_waited_s"]),
            _number(tier["claimed"]),
            _number(tier["running"]),
            f"{tier['finished_per_s']:.1f}",
            _against(tier["ttft_p99_s"], slo["ttft_p99_s"]),
            _duration(slo["ttft_p99_s"]),
            _against(tier["itl_p99_s"], slo["itl_p99_s"]),
            _duration(slo["itl_p99_s"]),
            _share(tier["attainment"]) if tier["interactive"] else UNKNOWN,
        )
    return table


def _workers(workers: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not workers:
        return Text("\nNo worker is alive.", style="bold red")
    table = _table("worker", "device", "busy", "KV", "GPU", "GPU memory", "heartbeat")
    for worker in workers:
        gpus = worker["gpus"]
        busy = [gpu["busy"] for gpu in gpus if gpu["busy"] is not None]
        table.add_row(
            Text(worker["id"], style="bold"),
            worker["device"],
            _bar(worker["busy"]),
            _bar(worker["kv_usage"], HIGH),
            _share(sum(busy) / len(busy)) if busy else UNKNOWN,
            _memory(gpus),
            f"{_duration(worker['heartbeat_age_s'])} ago",
        )
    return table


def _batches(batches: Mapping[str, int]) -> Text:
    counts = (f"{status} {count}" for status, count in batches.items() if count)
    return Text(f"\nbatches  {', '.join(counts) or 'none'}")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"\n{first}", no_wrap=True)
    for name in others:
        table.add_column(f"\n{name}", justify="left" if name in ("device", "busy", "KV") else "right", no_wrap=True)
    return table


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _against(seconds: float | None, slo_s: float | None) -> Text:
    """Return an observed latency, red if it is over its SLO."""
    is_late = seconds is not None and slo_s is not None and seconds > slo_s
    return Text(_duration(seconds), style="bold red" if is_late else "")


def _bar(share: float | None, high: float = 2.0) -> Text:
    """Return a share as a bar and a number, red from `high` on."""
    if share is None:
        return Text(UNKNOWN)
    filled = round(share * BAR_CELLS)
    style = "red" if share >= high else "cyan"
    return Text.assemble(("█" * filled, style), ("░" * (BAR_CELLS - filled), "dim"), f" {share:4.0%}")


def _memory(gpus: Sequence[Mapping[str, Any]]) -> str:
    if not gpus:
        return UNKNOWN
    used, total = (sum(gpu[key] for gpu in gpus) / 1024 for key in ("memory_used_mb", "memory_total_mb"))
    return f"{used:.1f} of {total:.0f} GiB"
