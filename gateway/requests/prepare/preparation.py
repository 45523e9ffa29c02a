"""Prepare a request for its tier: check it, plan its output, tokenise it, and build the scheduler's requests.

Knows bodies, prompts, tiers and the model; does not know HTTP, admission, or how tokens become an answer.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.interface import ModelKind
from gateway.fairness import FairLock
from gateway.http.trace import CURRENT_TRACE
from gateway.identity import cache_salt
from gateway.output.model_format import ModelFormat
from gateway.output.plan import OutputPlan, has_grammar, plan_output
from gateway.output.template_values import template_values
from gateway.protocol.bodies.schemas import MAX_CHOICES, AnyRequest, ChatCompletionRequest, CompletionRequest
from gateway.protocol.errors import invalid_value, model_not_found, wrong_kind
from gateway.requests.answers.answer import Answer
from gateway.requests.answers.answer_options import answer_options
from gateway.requests.answers.openai_objects import AnswerHead, ChatAnswer, TextAnswer
from gateway.requests.answers.token_report import TokenReport
from gateway.requests.prepare.images import STANDS_FOR_IMAGE, check_images, image_places, passed_on
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import (
    HasDeadline,
    PreparedRequest,
    as_part_of_job,
    delivery_of,
    demotion,
    time_limit_ms,
)
from gateway.requests.prepare.prompts import ModelLimits, Prompt, check_prompt_logprobs, encode, fitting, model_limits
from gateway.requests.prepare.sampling import (
    Constraints,
    check_supported,
    check_token_ids,
    constraints_of,
    sampling_params,
    unsupported_by,
)
from gateway.requests.prepare.trace_attributes import describe_request
from gateway.requests.tokens.model_files import SamplingDefaults
from gateway.requests.tokens.prompt_threads import PromptThreads
from gateway.requests.tokens.tokenizer import RunInThread, Tokenizer
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.request import CHAT_VERSION, USUAL_VERSION, Request

INLINE_CHOICES = 64  # each step of the work on so many takes less than 5 ms

# From a `service_tier` and the report of an answer's tokens to the answer's format.
AnswerAs = Callable[[str, TokenReport | None], Answer]


@dataclass(frozen=True, slots=True)
class Model:
    """The model whose requests are prepared.

    `fingerprint` tells one version of the model from another. `adapters` are those of `names` that name a LoRA adapter.
    `trusts_templates` says whether a request may bring its own chat template.
    """

    names: tuple[str, ...]
    adapters: frozenset[str]
    tokenizer: Tokenizer
    format: ModelFormat
    defaults: SamplingDefaults
    fingerprint: str
    trusts_templates: bool
    vocabulary: str = ""  # see `vocabulary_of` in gateway/requests/tokens/model_files.py
    kind: ModelKind = "chat"
    image_tokens: int = 0  # that an image counts until the server behind says how many it has; 0: no images


@dataclass(frozen=True, slots=True)
class _Tokenised:
    prompts: list[Prompt]
    constraints: Constraints
    chat: str = ""  # see `Request.chat`


class Preparation:
    """Prepares the requests of one gateway. `lock` has the turns of all that is done on the event loop for requests."""

    def __init__(self, model: Model, client: SchedulerClient, clock: Clock, lock: FairLock) -> None:
        self.model = model
        self.clock = clock
        self._client = client
        self._lock = lock
        self._threads = PromptThreads()
        self.threads_of = self._threads.of

    async def prepare(
        self, request: AnyRequest, placement: Placement, answer_as: AnswerAs | None = None
    ) -> PreparedRequest:
        """Return `request` with its scheduler requests.

        `answer_as` is the answer's format (None: that of the request's own endpoint). Raises `ApiError` 404 if the
        model is unknown, and 400 if the request is invalid or does not fit into the context.
        """
        arrival_ms = self.clock.wall_ms()
        describe_request(CURRENT_TRACE.get(), request)
        limits = self.limits()
        self._check(request, placement.tier, limits)
        run = self._threads.of(placement.tier, placement.owner)
        output = await self._plan_output(request, run)
        tokenised = await self._tokenise(request, output, limits, run)
        await self.let_others_run(request.num_sequences * len(tokenised.prompts), placement.owner)
        check_prompt_logprobs(request, tokenised.prompts)
        return self._build(request, placement, output, tokenised, arrival_ms, answer_as)

    async def encode(self, request: AnyRequest, tier: Tier, owner: str | None) -> list[int]:
        """Return the tokens of the one prompt of `request`. Raises `ApiError` 400 if there is none."""
        run = self._threads.of(tier, owner)
        output = await self._plan_output(request, run)
        [ids] = await self._encoded(request, output, self.limits(), run)
        return ids

    async def let_others_run(self, num_choices: int, owner: str | None) -> None:
        """Let the event loop do whatever else is due between two steps of the work on many choices."""
        if num_choices > INLINE_CHOICES:
            await asyncio.sleep(0)
            await self._lock.acquire(owner or "")

    def limits(self) -> ModelLimits:
        return model_limits(self._client.live.engines, self.model.tokenizer, self.model.kind)

    def check_model(self, name: str, kind: ModelKind) -> None:
        """Raise `ApiError` if `name` is not a name of the model, or if the model is of another kind."""
        if name not in self.model.names:
            raise model_not_found(name)
        if self.model.kind != kind:
            raise wrong_kind(name, self.model.kind, kind)

    def _check(self, request: AnyRequest, tier: Tier, limits: ModelLimits) -> None:
        self.check_model(request.model, "chat")
        _check_choices(request, tier)
        check_token_ids(request, limits.vocab_size)

    async def _plan_output(self, request: AnyRequest, run: RunInThread) -> OutputPlan:
        """Return how the output is constrained and parsed. Raises `ApiError` 400 if it cannot be."""
        model = self.model
        values: Mapping[str, Any] = {}
        if isinstance(request, ChatCompletionRequest):
            values = template_values(request, model.tokenizer.chat_template, model.trusts_templates)
        enforces = "grammar" not in unsupported_by(self._client.live.engines)
        prompt_of = model.tokenizer.generation_prompt
        plan = partial(plan_output, request, model.format, prompt_of, values, text_grammars=enforces)
        return await run(plan, is_long=False) if has_grammar(request) else plan()

    async def _tokenise(
        self, request: AnyRequest, output: OutputPlan, limits: ModelLimits, run: RunInThread
    ) -> _Tokenised:
        constraints = await constraints_of(request, output.grammar, self.model.tokenizer, run)
        prompts = fitting(request, await self._encoded(request, output, limits, run), limits)
        if not (isinstance(request, ChatCompletionRequest) and image_places(request)):
            return _Tokenised(prompts, constraints)
        write = partial(passed_on, request, output.template_values, prompts[0].max_tokens)
        return _Tokenised(prompts, constraints, await run(write, is_long=True))

    async def _encoded(
        self, request: AnyRequest, output: OutputPlan, limits: ModelLimits, run: RunInThread
    ) -> list[list[int]]:
        """Return the tokens of each prompt. Raises `ApiError` 400 as `encode` and `check_images` do."""
        num_beside = check_images(request, self.model.image_tokens)
        encoded = await encode(request, self.model.tokenizer, limits, output.template_values, run)
        return [ids + [STANDS_FOR_IMAGE] * num_beside for ids in encoded] if num_beside else encoded

    def _build(
        self,
        request: AnyRequest,
        placement: Placement,
        output: OutputPlan,
        tokenised: _Tokenised,
        arrival_ms: int,
        answer_as: AnswerAs | None,
    ) -> PreparedRequest:
        requests = self._requests(request, placement, tokenised, arrival_ms)
        check_supported(requests, self._client.live.engines, has_tools="tools" in output.template_values)
        report, options = self._report(request), request.stream_options
        include_usage = bool(options and options.include_usage)

        def answer(service_tier: str) -> Answer:
            if answer_as is not None:
                return answer_as(service_tier, report)
            return self._answer(request, placement.request_id, service_tier, arrival_ms, output.legacy, report)

        return PreparedRequest(
            placement=placement,
            answer=answer(placement.service_tier),
            requests=requests,
            n=request.num_sequences,
            options=answer_options(request),
            num_kept=(request.n or 1) if request.chooses_best else None,
            prompt_texts=tuple(prompt.text for prompt in tokenised.prompts),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            demotion=demotion(placement.demotion, answer, request, arrival_ms),
            is_output_limited=request.output_limit is not None,
            output=output,
        )

    def fields_of(self, request: HasDeadline, placement: Placement, arrival_ms: int) -> dict[str, Any]:
        """Return the fields that all scheduler's requests of `request` have in common, whatever it asks for."""
        return {
            "tier": placement.tier.name,
            "arrival_ms": arrival_ms,
            "deadline_ms": arrival_ms + time_limit_ms(request, placement.tier),
            "reply_to": self._client.gateway_id,
            "version": USUAL_VERSION,
            "owner": placement.owner or "",
            "weight": placement.weight,
            "wants_receipt": placement.receipt_for is not None,
            "traceparent": CURRENT_TRACE.get().traceparent,
            "vocabulary": self.model.vocabulary,
        }

    def _requests(
        self, request: AnyRequest, placement: Placement, tokenised: _Tokenised, arrival_ms: int
    ) -> tuple[Request, ...]:
        """Return the scheduler's requests: all choices of the first prompt, then those of the next."""
        n, tier = request.num_sequences, placement.tier
        adapter = request.model if request.model in self.model.adapters else None
        shared = self.fields_of(request, placement, arrival_ms) | {
            **delivery_of(request, tier),
            "cache_salt": cache_salt(placement.owner, request.cache_salt),
            "is_seeded": request.seed is not None,
        }
        if tokenised.chat:
            shared |= {"version": CHAT_VERSION, "chat": tokenised.chat}
        requests = []
        for i, prompt in enumerate(tokenised.prompts):
            seed = secrets.randbits(63) if request.seed is None else request.seed
            for j in range(n):
                index, options = i * n + j, (prompt.max_tokens, seed + j, tokenised.constraints, adapter)
                sampling = sampling_params(request, self.model.defaults, *options)
                request_id, ids = f"{placement.request_id}-{index}", prompt.token_ids
                choice = Request(id=request_id, prompt_token_ids=ids, sampling=sampling, **shared)
                requests.append(as_part_of_job(choice, placement.part, index, tier, self.model.fingerprint))
        return tuple(requests)

    def _report(self, request: AnyRequest) -> TokenReport | None:
        """Return what the answer reports of its tokens; None if the client asked for nothing of that kind."""
        if request.num_logprobs is None and request.prompt_logprobs is None and not request.return_token_ids:
            return None
        return TokenReport(
            self.model.tokenizer.texts,
            request.num_logprobs,
            request.prompt_logprobs,
            as_ids=bool(request.return_tokens_as_token_ids),
            with_ids=bool(request.return_token_ids),
        )

    def _answer(
        self,
        request: AnyRequest,
        request_id: str,
        service_tier: str,
        now_ms: int,
        legacy_calls: bool,
        report: TokenReport | None,
    ) -> Answer:
        chat = isinstance(request, ChatCompletionRequest)
        prefix = ChatAnswer.id_prefix if chat else TextAnswer.id_prefix
        answer_id = prefix + (request.request_id or request_id.removeprefix("req_"))
        head = AnswerHead(answer_id, now_ms // 1000, request.model, service_tier, self.model.fingerprint)
        return ChatAnswer(head, report, legacy_calls=legacy_calls) if chat else TextAnswer(head, report)


def _check_choices(request: AnyRequest, tier: Tier) -> None:
    num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    check_count(request.num_sequences * num_prompts, tier, "n")


def check_count(num_choices: int, tier: Tier, param: str) -> None:
    """Refuse a request with more choices than the tier's queue can hold. Raises `ApiError` 400.

    All choices of a request enter the queue together, so such a request could never enter the queue.
    """
    limit = min(MAX_CHOICES, tier.queue_limit)
    if num_choices > limit:
        what = "choices in all" if param == "n" else "entries"
        raise invalid_value(param, f"Invalid value for '{param}': {num_choices} {what}, {limit} at most.")
