"""Which workers hold the KV of what a prompt begins with, as far as this gateway has seen, and what it is worth.

A chat's next turn costs the worker that served the last one only what is new. The gateway remembers, for the beginnings
of prompts, which workers have computed them, and prefers those for requests that begin alike. A wrong guess does little
harm: the worker computes what its cache lacks, and holds it from then on. Knows requests and heartbeats; does no I/O.
"""

from collections import OrderedDict
from collections.abc import Sequence

from scheduler.client.inflight import TierUsage
from scheduler.queue.base import Preference
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import Request, TokenEvent, prefix_digests

BLOCK = 64  # tokens; shorter beginnings are not worth a preference
# Beginnings that are remembered. A prompt of 4,000 tokens has 8 of them, its next turn one or two more: so these are
# about 10,000 conversations, more than the caches of ten GPUs hold. They take 20 MB.
MAX_BEGINNINGS = 2**16


class PrefixAffinity:
    def __init__(self) -> None:
        # By beginning, the one used last comes last: for how many requests each worker has computed or found it.
        self._uses: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._open: dict[str, tuple[int, ...]] = {}  # the beginnings of requests without a first token, by request id
        self._caching: dict[str, WorkerStatus] = {}  # live workers with a prefix cache, by id

    def prefer(
        self, requests: Sequence[Request], workers: Sequence[WorkerStatus], usage: TierUsage, wall_ms: int
    ) -> Preference | None:
        """Return the preference of requests that are about to be put; None if no worker saves anything.

        The first request counts. A preferred worker may be busier than others, by as many requests as fit into the time
        that the cache saves: requests that are half done, and else like this one without its cached tokens. A beginning
        of many requests is worth having at several workers, so its saving is divided by its uses at each of them.
        """
        request = requests[0]
        self._caching = {w.worker_id: w for w in workers if w.caches_prefixes}
        if len(self._caching) < 2 or len(request.prompt_token_ids) <= BLOCK:
            return None
        digests = prefix_digests(request, BLOCK)
        self._open[request.id] = tuple(d for n, d in enumerate(digests, 1) if n == len(digests) or not n & (n - 1))
        if request.sampling.prompt_logprobs is not None:
            return None  # all of the prompt is computed
        uses, num_held, num_common = self._find(digests)
        status = self._caching[next(iter(uses))].tiers.get(request.tier) if num_held > num_common else None
        capacity = None if status is None else status.capacity
        if capacity is None or not (capacity.prefill_tokens_per_s and capacity.whole_output_tokens_per_s):
            return None
        saved_s = (num_held - num_common) * BLOCK / capacity.prefill_tokens_per_s
        left_s = (len(request.prompt_token_ids) - num_held * BLOCK) / capacity.prefill_tokens_per_s
        output_share = 1.0 if usage.output_share is None else usage.output_share
        left_s += output_share * request.sampling.max_tokens / capacity.whole_output_tokens_per_s
        slack = int(saved_s / (left_s / 2) * len(uses) / sum(uses.values()))
        return Preference(tuple(uses), slack, wall_ms + int(1000 * saved_s))

    def _find(self, digests: Sequence[int]) -> tuple[dict[str, int], int, int]:
        """Return the uses of the longest known beginning, its length in blocks, and the length of what all hold."""
        longest: tuple[dict[str, int], int] = {}, 0
        for num_blocks in range(len(digests), 0, -1):
            known = self._uses.get(digests[num_blocks - 1], {})
            uses = {worker: count for worker, count in known.items() if worker in self._caching}
            longest = longest if longest[0] or not uses else (uses, num_blocks)
            if len(uses) == len(self._caching):
                return *longest, num_blocks
        return *longest, 0

    def on_event(self, event: TokenEvent) -> None:
        """Process an event of a request: the first tokens tell which worker holds its prompt."""
        if not (event.worker and event.token_ids):
            return
        for digest in self._open.pop(event.request_id, ()):
            known = self._uses.pop(digest, {})
            uses = self._uses[digest] = {worker: count for worker, count in known.items() if worker in self._caching}
            uses[event.worker] = uses.get(event.worker, 0) + 1
        while len(self._uses) > MAX_BEGINNINGS:
            self._uses.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended or was never enqueued."""
        self._open.pop(request_id, None)
