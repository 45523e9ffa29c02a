"""Metrics as Prometheus text: a gateway's own, and those of workers, merged into one page."""

from collections.abc import Iterator, Mapping

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.http.vllm_names import vllm_families

log = structlog.get_logger(__name__)


def render(registry: CollectorRegistry, snapshots: Mapping[str, str], model: str = "") -> bytes:
    """Return the metrics of `registry` and of the workers as one Prometheus text.

    `snapshots` maps each worker's id to the Prometheus text of this worker. The worker's samples get the label `worker`
    with this id. The main families have a second name, that of vLLM, with the label `model_name`: `model`.
    """
    return generate_latest(_Merged(registry, snapshots, model))


class _Merged(Collector):
    def __init__(self, registry: CollectorRegistry, snapshots: Mapping[str, str], model: str) -> None:
        self._registry = registry
        self._snapshots = snapshots
        self._model = model

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for family in self._registry.collect():
            families[family.name] = family
        for worker, text in sorted(self._snapshots.items()):
            for family in _parse(worker, text):
                _merge(families, family, worker)
        yield from families.values()
        yield from vllm_families(families, self._model)


def _parse(worker: str, text: str) -> list[Metric]:
    """Return the metric families of a worker; an empty list if its snapshot is malformed.

    One malformed snapshot must not hide the metrics of the other workers.
    """
    try:
        return list(text_string_to_metric_families(text))
    except Exception as error:  # the parser has no error type of its own
        log.warning("worker_metrics_malformed", worker=worker, error=type(error).__name__)
        return []


def _merge(families: dict[str, Metric], family: Metric, worker: str) -> None:
    target = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        target.samples.append(sample._replace(labels={**sample.labels, "worker": worker}))
