"""The main metric families under vLLM's names, so that recipes and inference gateways made for vLLM find them.

They are made of the same samples when /metrics is rendered, and cost nothing when something is counted. A family of
ours has a series for each tier and worker; vLLM knows no tiers, so tiers are added up. Counters and histograms keep a
series for each worker, with its id in vLLM's label `engine`: a sum over workers would fall when one of them restarts,
and rates would take that for a reset. Gauges are those of all workers together, with `engine="0"`: inference gateways
read one number for an endpoint. The label `model` of one of several models becomes vLLM's `model_name`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
ALL_ENGINES = "0"  # vLLM's own label of a server with one engine

# Our families under vLLM's names, as vLLM 0.32 exports them: those whose samples are added up, for each worker.
SUMMED = {
    "tidegate_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "tidegate_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "tidegate_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "tidegate_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "tidegate_prompt_tokens": "vllm:prompt_tokens",
    "tidegate_generation_tokens": "vllm:generation_tokens",
    "tidegate_prefix_cache_queries": "vllm:prefix_cache_queries",
    "tidegate_prefix_cache_hits": "vllm:prefix_cache_hits",
    "tidegate_num_preemptions": "vllm:num_preemptions",
}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


# Gauges: vLLM's name, and how the values of several workers become one.
GAUGES: dict[str, tuple[str, Callable[[Iterable[float]], float]]] = {
    "tidegate_num_requests_running": ("vllm:num_requests_running", sum),
    # Each worker sees the same queue in the store.
    "tidegate_num_requests_waiting": ("vllm:num_requests_waiting", max),
    "tidegate_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", _mean),
}


def vllm_families(families: Mapping[str, Metric], model: str) -> Iterator[Metric]:
    """Return the families under vLLM's names, for those of `families` that have one.

    `model` is that of samples without a label `model`.
    """
    for name, alias in SUMMED.items():
        if name in families:
            yield _summed(families[name], alias, model)
    for name, (alias, merge) in GAUGES.items():
        if name in families:
            gauge = _summed(families[name], alias, model)
            by_model: dict[str, list[float]] = {}
            for sample in gauge.samples:
                by_model.setdefault(sample.labels["model_name"], []).append(sample.value)
            gauge.samples = [
                Sample(alias, {"model_name": own, "engine": ALL_ENGINES}, merge(values))
                for own, values in by_model.items()
            ]
            yield gauge


def _summed(family: Metric, alias: str, model: str) -> Metric:
    """Return `family` as `alias`: the sum over tiers for each worker and bucket."""
    sums: dict[tuple[str, str, str, str | None], float] = {}
    for sample in family.samples:
        own, worker = sample.labels.get("model", model), sample.labels.get("worker", "")
        key = (sample.name.removeprefix(family.name), own, worker, sample.labels.get("le"))
        sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(alias, family.documentation, family.type)
    for (suffix, own, worker, bound), value in sums.items():
        labels = {"model_name": own, "engine": worker}
        renamed.samples.append(Sample(alias + suffix, labels if bound is None else {**labels, "le": bound}, value))
    return renamed
