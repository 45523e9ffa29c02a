"""Metrics as Prometheus text: a worker's page, and a gateway's, which may include the pages of workers.

The samples of a worker have the label `worker` with its id, and where there are several models, those of a model have
the label `model`. The main families have a second name, that of vLLM, with the label `model_name`.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.http.vllm_names import PREFIX, vllm_families
from scheduler.registry.worker_status import WorkerStatus

if TYPE_CHECKING:
    import httpx  # imported by the first page that is read: few gateways read any

log = structlog.get_logger(__name__)

PAGE_TIMEOUT_S = 1.0  # seconds for a worker to show its metrics


class WorkerPages:
    """Reads the metrics of the workers `worker_ids`, which are on this machine, from their own ports."""

    def __init__(self, worker_ids: Collection[str] = (), transport: "httpx.AsyncBaseTransport | None" = None) -> None:
        self._worker_ids = worker_ids
        self._transport = transport

    async def read(self, workers: Iterable[WorkerStatus]) -> dict[str, str]:
        """Return the page of each of these `workers`, by id. Those that do not answer in time are left out."""
        wanted = {w.worker_id: w.page for w in workers if w.worker_id in self._worker_ids and w.page}
        if not wanted:
            return {}
        import httpx

        client = httpx.AsyncClient(transport=self._transport, trust_env=False, verify=False, timeout=PAGE_TIMEOUT_S)
        async with client as http:
            texts = await asyncio.gather(*(_read(http, page) for page in wanted.values()))
        return {worker_id: text for worker_id, text in zip(wanted, texts, strict=True) if text is not None}


async def _read(http: "httpx.AsyncClient", page: str) -> str | None:
    import httpx

    try:
        async with asyncio.timeout(PAGE_TIMEOUT_S):
            return (await http.get(page)).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # TimeoutError is an OSError
        log.warning("worker_metrics_not_read", page=page, error=str(error) or type(error).__name__)
        return None


def render(
    registry: CollectorRegistry,
    pages: Mapping[str, str],
    model: str = "",
    models: Mapping[str, CollectorRegistry] | None = None,
) -> bytes:
    """Return the metrics of `registry` and of the workers with these pages, by worker id, as one page.

    `models` has further registries by the name of their model, which their samples get as the label `model`.
    """
    families = {family.name: family for family in registry.collect()}
    for name, own in (models or {}).items():
        _merge(families, own.collect(), model=name)
    for worker, text in sorted(pages.items()):
        _merge(families, _parse(worker, text), worker=worker)
    return generate_latest(_Families(families, model))


def render_worker(registry: CollectorRegistry, worker: str, model: str, *, is_one_of_several: bool = False) -> bytes:
    """Return the metrics of the worker with this id as a page. The samples of one of several models name it."""
    families: dict[str, Metric] = {}
    labels = {"worker": worker, "model": model} if is_one_of_several else {"worker": worker}
    _merge(families, registry.collect(), **labels)
    return generate_latest(_Families(families, model))


class _Families(Collector):
    """Metric families, and those with vLLM's names that are made of them."""

    def __init__(self, families: Mapping[str, Metric], model: str) -> None:
        self._families = families
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()
        yield from vllm_families(self._families, self._model)


def _parse(worker: str, text: str) -> list[Metric]:
    """Return the metric families of a worker; an empty list if its page is malformed.

    One malformed page must not hide the metrics of the other workers.
    """
    try:
        return list(text_string_to_metric_families(text))
    except Exception as error:  # the parser has no error type of its own
        log.warning("worker_metrics_malformed", worker=worker, error=type(error).__name__)
        return []


def _merge(families: dict[str, Metric], added: Iterable[Metric], **labels: str) -> None:
    """Add families with further labels, except those with vLLM's names: they are made anew of all workers together."""
    for family in added:
        if family.name.startswith(PREFIX):
            continue
        target = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            target.samples.append(sample._replace(labels={**sample.labels, **labels}))
