"""The comparison of orders, in virtual time: shared prefixes gain, jobs without them lose nothing."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.batch_order.command import ordered
from bench.batch_order.jobs import JOBS, make_job_lines


@pytest.mark.timeout(120)
def test_the_order_pays_where_prompts_begin_alike_and_costs_nothing_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "order.json"
    flags = ["--simulated", "135m-cpu", "--jobs", "few-shot,synthesis", "--lines", "171", "--rounds", "1"]
    main(["batch-order", *flags, "--kv-tokens", "16384", "--json", str(out)])
    jobs = json.loads(out.read_text())["jobs"]
    assert jobs["few-shot"]["ratio"] >= 1.5
    assert jobs["few-shot"]["hit_rate"]["ordered"] > jobs["few-shot"]["hit_rate"]["input"]
    assert jobs["synthesis"]["ratio"] >= 0.99


@pytest.mark.parametrize("name", JOBS)
def test_both_orders_have_the_same_lines(name: str) -> None:
    lines = make_job_lines(name, 40, 2048, 1)
    key = lambda line: int(line["custom_id"])  # noqa: E731
    assert sorted(ordered(lines), key=key) == lines
    assert all(len(line["body"]["prompt"]) + line["body"]["max_tokens"] <= 2048 for line in lines)
