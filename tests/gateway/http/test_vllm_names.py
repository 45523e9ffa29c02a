"""The families under vLLM's names, on /metrics of a gateway with two workers."""

from prometheus_client import CollectorRegistry

from gateway.http.exposition import render
from tests.gateway.routes.test_ops import samples_of

WORKER = """\
# TYPE tidegate_num_requests_running gauge
tidegate_num_requests_running{tier="realtime"} 3
tidegate_num_requests_running{tier="bulk"} 40
# TYPE tidegate_num_requests_waiting gauge
tidegate_num_requests_waiting{tier="realtime"} 1
tidegate_num_requests_waiting{tier="bulk"} 100
# TYPE tidegate_kv_cache_usage_ratio gauge
tidegate_kv_cache_usage_ratio 0.5
# TYPE tidegate_generation_tokens_total counter
tidegate_generation_tokens_total{tier="realtime"} 7
tidegate_generation_tokens_total{tier="bulk"} 5
# TYPE tidegate_time_to_first_token_seconds histogram
tidegate_time_to_first_token_seconds_bucket{le="0.1",tier="realtime"} 1
tidegate_time_to_first_token_seconds_bucket{le="+Inf",tier="realtime"} 2
tidegate_time_to_first_token_seconds_bucket{le="0.1",tier="bulk"} 0
tidegate_time_to_first_token_seconds_bucket{le="+Inf",tier="bulk"} 4
tidegate_time_to_first_token_seconds_count{tier="realtime"} 2
tidegate_time_to_first_token_seconds_count{tier="bulk"} 4
tidegate_time_to_first_token_seconds_sum{tier="realtime"} 0.5
tidegate_time_to_first_token_seconds_sum{tier="bulk"} 2
"""
OTHER = WORKER.replace("usage_ratio 0.5", "usage_ratio 0.1").replace("} 7", "} 70")


def labels(engine: str, **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model_name": "m", "engine": engine, **more}.items()))


def page(**workers: str) -> str:
    return render(CollectorRegistry(), workers, "m").decode()


def test_gauges_are_one_number_for_all_workers() -> None:
    samples = samples_of(page(a=WORKER, b=OTHER))
    assert samples["vllm:num_requests_running", labels("0")] == 86
    assert samples["vllm:num_requests_waiting", labels("0")] == 101, "both see the same queue"
    assert samples["vllm:kv_cache_usage_perc", labels("0")] == 0.3


def test_the_names_on_a_workers_page_are_made_anew_of_all_workers() -> None:
    assert page(a=page(a=WORKER), b=page(b=OTHER)) == page(a=WORKER, b=OTHER)


def test_counters_and_histograms_are_sums_over_tiers_for_each_worker() -> None:
    samples = samples_of(page(a=WORKER, b=OTHER))
    name = "vllm:time_to_first_token_seconds"
    assert samples["vllm:generation_tokens_total", labels("a")] == 12
    assert samples["vllm:generation_tokens_total", labels("b")] == 75
    assert [samples[f"{name}_bucket", labels("a", le=bound)] for bound in ("0.1", "+Inf")] == [1, 6]
    assert (samples[f"{name}_count", labels("b")], samples[f"{name}_sum", labels("b")]) == (6, 2.5)


def test_each_of_several_models_has_its_own_series() -> None:
    of_b = OTHER.replace("{tier", '{model="b",tier').replace("usage_ratio 0.1", 'usage_ratio{model="b"} 0.1')
    samples = samples_of(page(w1=WORKER, w2=of_b))
    own = {
        dict(found)["model_name"]: value
        for (name, found), value in samples.items()
        if name.endswith("running") and name.startswith("vllm")
    }
    assert own == {"m": 43, "b": 43}
    usage = {
        dict(found)["model_name"]: value
        for (name, found), value in samples.items()
        if name == "vllm:kv_cache_usage_perc"
    }
    assert usage == {"m": 0.5, "b": 0.1}
    assert samples["vllm:generation_tokens_total", tuple(sorted({"model_name": "b", "engine": "w2"}.items()))] == 75
