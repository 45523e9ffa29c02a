"""What the span of a request says about it, in the names of OpenTelemetry's conventions for generative AI.

No text of prompts or answers is in it.
"""

from collections.abc import Sequence

from gateway.http.trace import RequestTrace
from gateway.protocol.bodies.schemas import AnyRequest, ChatCompletionRequest
from gateway.protocol.bodies.vectors import VectorRequest
from gateway.requests.answers.chunks import Usage

PROVIDER = "tidegate"


def describe_request(trace: RequestTrace, request: AnyRequest) -> None:
    is_chat = isinstance(request, ChatCompletionRequest)
    trace.note(
        gen_ai__operation__name="chat" if is_chat else "text_completion",
        gen_ai__provider__name=PROVIDER,
        gen_ai__request__model=request.model,
        gen_ai__response__model=request.model,
        gen_ai__request__max_tokens=request.output_limit if is_chat else request.max_tokens,
        gen_ai__request__temperature=request.temperature,
        gen_ai__request__top_p=request.top_p,
        gen_ai__request__frequency_penalty=request.frequency_penalty,
        gen_ai__request__presence_penalty=request.presence_penalty,
        gen_ai__request__seed=request.seed,
        gen_ai__request__choice__count=request.n if request.n and request.n > 1 else None,
        gen_ai__request__stream=bool(request.stream),
        openai__request__service_tier=request.service_tier,
    )


def describe_vectors(trace: RequestTrace, request: VectorRequest) -> None:
    trace.note(
        gen_ai__operation__name="embeddings" if request.kind == "embedding" else request.kind,
        gen_ai__provider__name=PROVIDER,
        gen_ai__request__model=request.model,
        gen_ai__response__model=request.model,
        openai__request__service_tier=request.service_tier,
    )


def describe_answer(trace: RequestTrace, tier: str, used: Usage, reasons: Sequence[str]) -> None:
    trace.note(
        tidegate__tier=tier,
        gen_ai__response__finish_reasons=list(reasons) or None,
        gen_ai__usage__input_tokens=used.prompt_tokens,
        gen_ai__usage__output_tokens=used.completion_tokens,
        gen_ai__usage__cache_read__input_tokens=used.cached_tokens,
        gen_ai__usage__reasoning__output_tokens=used.reasoning_tokens or None,
    )
