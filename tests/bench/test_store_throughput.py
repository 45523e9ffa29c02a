"""The queue's measurement, against a real store: everything moves, and nothing is left."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from bench.store_throughput import StorePhase, StoreRate, measure_store, store_record
from loadtest.reporting.writers import render_text
from tidegate.valkey import running_valkey

ROOT = Path(__file__).parents[2]


async def test_all_requests_move_and_nothing_is_left(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as url:
        rate = await measure_store(url, requests=200, batch=64, prompt_tokens=16)
        with redis.Redis.from_url(url) as client:
            left = {key.decode() for key in client.keys("tidegate:*")}
    assert [(phase.name, phase.requests) for phase in rate.phases] == [("put", 200), ("claim", 200), ("ack", 200)]
    assert all(0 < phase.server_s < phase.elapsed_s for phase in rate.phases), "the store is one thread"
    assert left == {"tidegate:sequence"}


def test_the_command_starts_a_store_where_none_is_given() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "store", "--requests", "128", "--batches", "64"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "64 a call: a request costs the store" in done.stdout


def test_where_the_store_is_full_follows_from_its_own_seconds() -> None:
    phases = [StorePhase("put", 1000, 0.1, 0.03), StorePhase("ack", 1000, 0.1, 0.02)]
    rate = StoreRate(64, 128, phases)
    assert rate.server_us == pytest.approx(50.0)
    assert rate.full_at_per_s == pytest.approx(20_000)
    assert "10000 keep it busy 50 % of the time" in render_text(store_record([rate], 10_000))
