"""Metrics read once a second: counters, gauges and histograms over a window."""

import asyncio

import pytest

from loadtest.client.http import parse_target
from loadtest.client.server_metrics import Reading, Timeline, bucket_quantile, read_metrics, watch
from tests.loadtest.fake_server import FakeServer


def reading(at_s: float, *lines: str) -> Reading:
    return Reading(at_s, lines)


def test_labels_and_values_are_read_as_prometheus_writes_them() -> None:
    scrape = reading(
        0.0,
        'tidegate_num_preemptions_total{mode="pause",tier="bulk"} 3.0',
        'tidegate_num_preemptions_total{tier="bulk",mode="swap"} 2',
        'tidegate_num_preemptions_created{tier="bulk",mode="swap"} 1.7e+09',
        'tidegate_odd{text="a\\"b, c"} +Inf',
        "tidegate_kv_cache_usage_ratio 0.25",
    )
    assert scrape.total("tidegate_num_preemptions_total") == 5
    assert scrape.total("tidegate_num_preemptions_total", mode="swap") == 2
    assert scrape.total("tidegate_num_preemptions_total", mode="recompute") is None
    assert scrape.samples("tidegate_odd")[0].labels == {"text": 'a"b, c'}
    assert scrape.total("tidegate_kv_cache_usage_ratio") == 0.25


def test_a_counter_grows_over_the_window_and_a_series_that_came_late_began_at_nothing() -> None:
    timeline = Timeline(
        [reading(1.0, "a_total 5"), reading(2.0, "a_total 7", "b_total 2"), reading(4.0, "a_total 17", "b_total 3")]
    )
    assert timeline.delta("a_total") == 12 and timeline.delta("b_total") == 3
    assert timeline.delta("c_total") is None and Timeline().delta("a_total") is None
    assert timeline.gauge("b_total") == [(2.0, 2.0), (4.0, 3.0)]


def test_a_window_takes_the_readings_that_enclose_it() -> None:
    timeline = Timeline([reading(float(t)) for t in range(10)])
    assert [r.at_s for r in timeline.within(2.5, 5.5).readings] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert [r.at_s for r in timeline.within(3.0, 5.0).readings] == [3.0, 4.0, 5.0]


def test_a_histograms_quantile_is_that_of_the_window_alone() -> None:
    def scrape(at_s: float, counts: tuple[int, int, int]) -> Reading:
        bounds = zip(("0.1", "0.2", "+Inf"), counts, strict=True)
        return reading(at_s, *(f'h_bucket{{le="{le}",tier="a"}} {n}' for le, n in bounds))

    timeline = Timeline([scrape(0.0, (100, 100, 100)), scrape(1.0, (100, 140, 150))])
    buckets = timeline.buckets("h", tier="a")
    assert buckets == {0.1: 0, 0.2: 40, float("inf"): 50}
    assert bucket_quantile(buckets, 0.4) == pytest.approx(0.15)
    assert bucket_quantile(buckets, 0.99) == 0.2  # above the last bound nothing is known
    assert bucket_quantile({}, 0.5) is None and bucket_quantile({1.0: 0.0}, 0.5) is None


async def test_a_server_is_read_again_and_again_until_cancelled() -> None:
    async with FakeServer(step_seconds=1.5) as server:
        target, timeline = parse_target(server.url), Timeline()
        watching = asyncio.create_task(watch(target, timeline, every_s=0.01))
        async with asyncio.timeout(30):
            while len(timeline.readings) < 3:
                await asyncio.sleep(0.005)
        watching.cancel()
        assert (await read_metrics(target)).lines == ("tidegate_step_seconds_sum 1.5",)
    assert timeline.delta("tidegate_step_seconds_sum") == 0


async def test_a_server_that_is_gone_ends_the_watch() -> None:
    async with FakeServer() as server:
        target = parse_target(server.url)
    timeline = Timeline()
    await asyncio.wait_for(watch(target, timeline), 30)
    assert timeline.readings == []
