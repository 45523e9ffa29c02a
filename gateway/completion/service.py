"""Turn a validated body into scheduler requests and submit them, for the two HTTP routes and for batch lines.

Knows bodies, prompts, tiers and the scheduler's client. Does not know HTTP, and does not know how tokens become an
answer (gateway/completion/generation.py does).
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from gateway.completion.answer import Answer
from gateway.completion.answer_options import answer_options
from gateway.completion.capabilities import check_supported
from gateway.completion.generation import Demotion, Generation, PreparedRequest
from gateway.completion.metering import UNMETERED, Metering
from gateway.completion.openai_objects import AnswerHead, ChatAnswer, TextAnswer
from gateway.completion.prompt_threads import PromptThreads
from gateway.completion.prompts import Prompt, check_prompt_logprobs, encode_only, encode_prompts, model_limits
from gateway.completion.sampling import Constraints, check_token_ids, constraints_of, sampling_params
from gateway.completion.sampling_defaults import SamplingDefaults
from gateway.completion.token_report import TokenReport
from gateway.completion.tokenizer import RunInThread, Tokenizer
from gateway.completion.trace_attributes import describe_request
from gateway.dead_letters import DeadLetters
from gateway.fairness import FairLock
from gateway.http.metrics import GatewayMetrics
from gateway.http.trace import CURRENT_TRACE
from gateway.identity import ResolvedTier, cache_salt
from gateway.output.model_format import ModelFormat
from gateway.output.plan import OutputPlan, has_grammar, plan_output
from gateway.output.template_values import template_values
from gateway.protocol.errors import ApiError, invalid_value, model_not_found, rejected
from gateway.protocol.json_body import is_large
from gateway.protocol.schemas import MAX_CHOICES, ChatCompletionRequest, CompletionRequest, parse_generation
from scheduler.client.client import SchedulerClient
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.token_stream import TokenStream
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.request import Delivery, JobPart, Request

OPENAI_DEFAULTS = SamplingDefaults()
INLINE_CHOICES = 64  # each step of the work on so many takes less than 5 ms
PING_S = 15.0  # seconds of silence before a keep-alive; proxies close connections that are silent for 30 to 60 s

AnyRequest = ChatCompletionRequest | CompletionRequest
ENDPOINTS: dict[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


def draw_seed() -> int:
    return secrets.randbits(63)


class CompletionService:
    def __init__(
        self,
        client: SchedulerClient,
        clock: Clock,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        model_names: tuple[str, ...],
        *,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
        draw_seed: Callable[[], int] = draw_seed,
        ping_s: float = PING_S,
        trusts_templates: bool = False,
        tool_parser: str = "auto",
        metering: Metering | None = None,
        dead_letters: DeadLetters | None = None,
        revision: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        """`trusts_templates` says whether a request may bring its own chat template.

        `revision` tells one version of the model's files from another; it is a part of the fingerprint. `adapters` are
        those of `model_names` that name a LoRA adapter.
        """
        self._client = client
        self._clock = clock
        self._tokenizer = tokenizer
        self._threads = PromptThreads()
        self._lock = FairLock()
        self._metrics = metrics
        self._model_names = model_names
        self._defaults = defaults
        self._draw_seed = draw_seed
        self._ping_s = ping_s
        self._trusts_templates = trusts_templates
        self._format = ModelFormat.of(tokenizer.chat_template, tokenizer.special_tokens, tool_parser)
        self._metering = metering
        self._dead_letters = dead_letters
        self._adapters = frozenset(adapters)
        self._fingerprint = "fp_" + hashlib.sha256(f"{model_names[0]}{revision}".encode()).hexdigest()[:10]

    @property
    def defaults(self) -> SamplingDefaults:
        """The sampling parameters of requests that do not set their own."""
        return self._defaults

    async def complete(
        self,
        endpoint: str,
        body: dict[str, Any],
        *,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None = None,
        wants_receipt: bool = False,
        part: JobPart | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Answer one request without streaming. Return the HTTP status and the JSON body of the answer.

        Refusals and failures are also returned as an answer. `service_tier` is the value that the answer reports.
        `request_id` must be new in every call, because the ids of the scheduler requests are made from it. `owner` is
        the name of the caller's key (None: access is open). The key's limits do not hold up batches, but what a batch
        uses is counted. `part` is the part of a job that this is (None: it is none).
        """
        try:
            await self._lock.acquire(owner or "")
            request = await _parse_endpoint(endpoint, body)
            prepared = await self.prepare(
                request, tier=tier, service_tier=service_tier, request_id=request_id, owner=owner
            )
            if wants_receipt:
                prepared = prepared.with_receipt(service_tier)
            stream = await self.submit_part(prepared, part)
            return 200, await stream.respond()
        except ApiError as error:
            return error.status, error.body()

    async def prepare(
        self,
        request: AnyRequest,
        *,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None = None,
        demotion: ResolvedTier | None = None,
        answer_as: Callable[[str, TokenReport | None], Answer] | None = None,
    ) -> PreparedRequest:
        """Tokenise `request`, and return it with its scheduler requests.

        `demotion` is the lower tier that serves the requests if `tier` cannot serve them in time. `answer_as` returns
        the answer's format for a `service_tier` and for the report of its tokens (None: the format of the request's own
        endpoint). Raises `ApiError` 404 if the model is unknown, and 400 if the request is invalid or does not fit into
        the context.
        """
        arrival_ms = self._clock.wall_ms()
        trace = CURRENT_TRACE.get()
        if trace is not None:
            describe_request(trace, request)
        if request.model not in self._model_names:
            raise model_not_found(request.model)
        limits = model_limits(self._client.workers, self._tokenizer)
        n = request.num_sequences
        _check_choices(request, n, tier)
        check_token_ids(request, limits.vocab_size)
        run = self._threads.of(tier, owner)
        output = await self._plan_output(request, run)
        constraints = await constraints_of(request, output.grammar, self._tokenizer, run)
        prompts = await encode_prompts(request, self._tokenizer, limits, output.template_values, run)
        await self._let_others_run(n * len(prompts), owner)
        check_prompt_logprobs(request, prompts)
        options = request.stream_options
        include_usage = bool(options and options.include_usage)

        traceparent = trace.traceparent if trace is not None else ""
        requests = self._requests(request, prompts, tier, request_id, arrival_ms, owner, constraints, traceparent)
        check_supported(requests, self._client.workers)
        report = self._report(request)

        def as_reported(reported: str) -> Answer:
            if answer_as is not None:
                return answer_as(reported, report)
            return self._answer(request, reported, request_id, arrival_ms, output.legacy, report)

        return PreparedRequest(
            answer=as_reported(service_tier),
            tier=tier,
            requests=requests,
            n=n,
            options=answer_options(request),
            num_kept=(request.n or 1) if request.chooses_best else None,
            prompt_texts=tuple(prompt.text for prompt in prompts),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            demotion=_demotion(demotion, as_reported, request, arrival_ms) if demotion is not None else None,
            owner=owner,
            is_seeded=request.seed is not None,
            is_output_limited=_is_output_limited(request),
            output=output,
        )

    async def encode(self, request: AnyRequest, tier: Tier, owner: str | None) -> list[int]:
        """Return the tokens of the one prompt of `request`. Raises `ApiError` 400 if there is none."""
        limits = model_limits(self._client.workers, self._tokenizer)
        run = self._threads.of(tier, owner)
        output = await self._plan_output(request, run)
        return await encode_only(request, self._tokenizer, limits, output.template_values, run)

    async def submit(
        self,
        prepared: PreparedRequest,
        cache_ttl_s: int | None = None,
        *,
        is_limited: bool = True,
        patient: str | None = None,
    ) -> Generation:
        """Enqueue `prepared`, or find its answer in the cache, and return the answer.

        The answer may come from the cache, or is put there for `cache_ttl_s` seconds (None: neither). `is_limited` says
        whether the limits of the owner's key count. Raises `ApiError` 429 if one of them is reached, and the errors of
        `_enqueue`.
        """
        account = UNMETERED
        if self._metering is not None:
            account = await self._metering.open(prepared, cache_ttl_s, is_limited=is_limited)
        try:
            tokens = account.replay(prepared.requests)
            if tokens is None:
                prepared, tokens = await self._enqueue(prepared, patient)
        except BaseException:
            await account.cancel()
            raise
        trace = CURRENT_TRACE.get()
        if trace is not None:
            trace.note_submitted()
        shared = (self._tokenizer, self._clock, self._ping_s, self._lock)
        return Generation(prepared, tokens, *shared, account, trace, self._dead_letters)

    async def submit_part(self, prepared: PreparedRequest, part: JobPart | None) -> Generation:
        """Enqueue `prepared` as a part of a job, as `submit` does. The limits of the owner's key do not count."""
        if part is not None:
            prepared = prepared.as_part_of_job(part, self._fingerprint)
        return await self.submit(prepared, is_limited=False)

    async def _enqueue(self, prepared: PreparedRequest, patient: str | None) -> tuple[PreparedRequest, TokenStream]:
        """Enqueue all scheduler requests of `prepared`, or none of them.

        If their own tier cannot serve them in time, they are enqueued in the lower tier of the demotion, if there is
        one. Raises `ApiError` 429 or 503 if admission rejects the requests. The error recommends the `service_tier`
        `patient`, if it is given.
        """
        await self._let_others_run(len(prepared.requests), prepared.owner)
        outcome = await self._client.submit(prepared.requests)
        demotion = prepared.demotion
        if isinstance(outcome, Rejected) and outcome.reason is RejectReason.OVERLOADED and demotion is not None:
            demoted = prepared.demoted(demotion)
            lower_outcome = await self._client.submit(demoted.requests)
            if not isinstance(lower_outcome, Rejected):
                self._metrics.count_demoted(prepared.tier.name, demoted.tier.name)
                prepared, outcome = demoted, lower_outcome
        if isinstance(outcome, Rejected):
            self._metrics.count_rejected(prepared.tier.name, outcome.reason.value)
            raise rejected(outcome, prepared.tier, patient)
        return prepared, outcome

    async def _let_others_run(self, num_choices: int, owner: str | None) -> None:
        """Let the event loop do whatever else is due between two steps of the work on many choices."""
        if num_choices > INLINE_CHOICES:
            await asyncio.sleep(0)
            await self._lock.acquire(owner or "")

    def _report(self, request: AnyRequest) -> TokenReport | None:
        """Return what the answer reports of its tokens; None if the client asked for nothing of that kind."""
        if request.num_logprobs is None and request.prompt_logprobs is None and not request.return_token_ids:
            return None
        return TokenReport(
            self._tokenizer.texts,
            request.num_logprobs,
            request.prompt_logprobs,
            as_ids=bool(request.return_tokens_as_token_ids),
            with_ids=bool(request.return_token_ids),
        )

    async def _plan_output(self, request: AnyRequest, run: RunInThread) -> OutputPlan:
        """Return how the output is constrained and parsed. Raises `ApiError` 400 if it cannot be."""
        values: Mapping[str, Any] = {}
        if isinstance(request, ChatCompletionRequest):
            values = template_values(request, self._tokenizer.chat_template, self._trusts_templates)
        plan = partial(plan_output, request, self._format, self._tokenizer.generation_prompt, values)
        return await run(plan, is_long=False) if has_grammar(request) else plan()

    def _answer(
        self,
        request: AnyRequest,
        service_tier: str,
        request_id: str,
        now_ms: int,
        legacy_calls: bool,
        report: TokenReport | None,
    ) -> Answer:
        chat = isinstance(request, ChatCompletionRequest)
        prefix = ChatAnswer.id_prefix if chat else TextAnswer.id_prefix
        answer_id = prefix + (request.request_id or request_id.removeprefix("req_"))
        head = AnswerHead(answer_id, now_ms // 1000, request.model, service_tier, self._fingerprint)
        return ChatAnswer(head, report, legacy_calls=legacy_calls) if chat else TextAnswer(head, report)

    def _requests(
        self,
        request: AnyRequest,
        prompts: list[Prompt],
        tier: Tier,
        request_id: str,
        arrival_ms: int,
        owner: str | None,
        constraints: Constraints,
        traceparent: str,
    ) -> tuple[Request, ...]:
        n = request.num_sequences
        salt = cache_salt(owner, request.cache_salt)
        delivery = _delivery(request, tier)
        adapter = request.model if request.model in self._adapters else None
        requests = []
        for i, prompt in enumerate(prompts):
            seed = self._draw_seed() if request.seed is None else request.seed
            for j in range(n):
                requests.append(
                    Request(
                        id=f"{request_id}-{i * n + j}",
                        tier=tier.name,
                        prompt_token_ids=prompt.token_ids,
                        sampling=sampling_params(
                            request, self._defaults, prompt.max_tokens, seed + j, constraints, adapter
                        ),
                        arrival_ms=arrival_ms,
                        deadline_ms=arrival_ms + _time_limit_ms(request, tier),
                        reply_to=self._client.gateway_id,
                        delivery=delivery,
                        cache_salt=salt,
                        is_seeded=request.seed is not None,
                        traceparent=traceparent,
                    )
                )
        return tuple(requests)


async def _parse_endpoint(endpoint: str, body: dict[str, Any]) -> AnyRequest:
    kind = ENDPOINTS.get(endpoint)
    if kind is None:
        raise ApiError(404, "Unknown endpoint.", param="url")
    parse = partial(parse_generation, kind, body)
    request = await asyncio.to_thread(parse) if is_large(body) else parse()
    if request.stream:
        raise invalid_value("stream", "Invalid value for 'stream': streaming is not possible here.")
    return request


def _check_choices(request: AnyRequest, n: int, tier: Tier) -> None:
    """Refuse a request with more choices than the tier's queue can hold. Raises `ApiError` 400.

    All choices of a request enter the queue together, so such a request could never enter the queue.
    """
    num_choices = n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
    limit = min(MAX_CHOICES, tier.queue_limit)
    if num_choices > limit:
        raise invalid_value("n", f"Invalid value for 'n': {num_choices} choices in all, {limit} at most.")


def _is_output_limited(request: AnyRequest) -> bool:
    limit = request.output_limit if isinstance(request, ChatCompletionRequest) else request.max_tokens
    return limit is not None


def _time_limit_ms(request: AnyRequest, tier: Tier) -> int:
    """Return the time from arrival to deadline in ms.

    This is the tier's `deadline_ms`. In a tier without a latency SLO, the request's own `deadline_ms` is used if it is
    less.
    """
    if request.deadline_ms is None or tier.is_interactive:
        return tier.deadline_ms
    return min(request.deadline_ms, tier.deadline_ms)


def _demotion(to: ResolvedTier, answer_as: Callable[[str], Answer], request: AnyRequest, arrival_ms: int) -> Demotion:
    return Demotion(to.tier, answer_as(to.service_tier), arrival_ms + _time_limit_ms(request, to.tier))


def _delivery(request: AnyRequest, tier: Tier) -> Delivery:
    """Return whether the worker sends tokens after each step, or all tokens at the end.

    Tokens are needed after each step for streams and for stop strings. They are also needed in interactive tiers with a
    timeout, because there the timeout bounds the TTFT. In the other tiers, it bounds the time to the whole answer.
    """
    awaits_first_token = tier.is_interactive and tier.timeout_ms is not None
    if request.stream or request.stop_strings or awaits_first_token:
        return Delivery.EACH_STEP
    return Delivery.AT_END
