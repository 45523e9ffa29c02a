"""Prepare a request of /v1/embeddings or /v1/rerank: one scheduler's request for each text, or for each pair of texts.

So the scheduler mixes the texts of all callers in its batches, and one of an interactive tier goes before the rest of a
bulk list. Knows bodies, the tokenizer and tiers; does not know HTTP or admission.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

from engine.interface import SamplingParams
from gateway.http.trace import CURRENT_TRACE
from gateway.protocol.bodies.vectors import EmbeddingRequest, RerankRequest, VectorRequest
from gateway.protocol.errors import ApiError, context_length_exceeded, invalid_value
from gateway.requests.answers.answer import Answer
from gateway.requests.answers.answer_options import AnswerOptions
from gateway.requests.answers.vectors import EmbeddingAnswer, RerankAnswer
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.preparation import Preparation, check_count
from gateway.requests.prepare.prepared import PreparedRequest, as_part_of_job, demotion
from gateway.requests.prepare.prompts import ModelLimits
from gateway.requests.prepare.trace_attributes import describe_vectors
from gateway.requests.tokens.encoded_texts import EncodedText, NothingLeft, encode_texts
from gateway.requests.tokens.tokenizer import RunInThread, TextTooLong, Tokenizer
from scheduler.request import PAIR_VERSION, Delivery, Request

# One token stands for the vector. Greedy: the same text gets the same vector, so that the answer cache may keep it.
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
NO_TEXT = AnswerOptions(decodes=False, only_prompt=True)


async def prepare_vectors(preparation: Preparation, request: VectorRequest, placement: Placement) -> PreparedRequest:
    """Return `request` with its scheduler requests. Raises `ApiError` 404 or 400, as `Preparation.prepare` does."""
    arrival_ms, tier = preparation.clock.wall_ms(), placement.tier
    describe_vectors(CURRENT_TRACE.get(), request)
    preparation.check_model(request.model, request.kind)
    check_count(len(request.inputs), tier, request.param)
    run = preparation.threads_of(tier, placement.owner)
    encoded = await _encode(request, preparation.model.tokenizer, preparation.limits(), run)
    await preparation.let_others_run(len(encoded), placement.owner)
    answer = partial(_answer, request, placement.request_id)
    return PreparedRequest(
        placement=placement,
        answer=answer(placement.service_tier),
        requests=_requests(preparation, request, placement, encoded, arrival_ms),
        n=1,
        options=NO_TEXT,
        prompt_texts=(None,) * len(encoded),
        demotion=demotion(placement.demotion, answer, request, arrival_ms),
        is_output_limited=True,
    )


def _requests(
    preparation: Preparation,
    request: VectorRequest,
    placement: Placement,
    encoded: Sequence[EncodedText],
    arrival_ms: int,
) -> tuple[Request, ...]:
    shared = preparation.fields_of(request, placement, arrival_ms) | {"delivery": Delivery.AT_END}
    if request.kind == "rerank":
        shared["version"] = PAIR_VERSION
    requests = []
    for index, (ids, second_from) in enumerate(encoded):
        new = Request(
            id=f"{placement.request_id}-{index}",
            prompt_token_ids=ids,
            sampling=SAMPLING,
            second_from=second_from,
            **shared,
        )
        requests.append(as_part_of_job(new, placement.part, index, placement.tier, preparation.model.fingerprint))
    return tuple(requests)


async def _encode(
    request: VectorRequest, tokenizer: Tokenizer, limits: ModelLimits, run: RunInThread
) -> Sequence[EncodedText]:
    """Return the tokens of each input. Raises `ApiError` 400 if one has none, too many or unknown ones."""
    asked, most = request.truncate_prompt_tokens, limits.max_model_len
    cut_to = None if asked is None else most if asked < 0 else min(asked, most)
    inputs = request.inputs
    if isinstance(inputs[0], list):
        id_lists = cast(Sequence[list[int]], inputs)
        if max(map(max, id_lists)) >= limits.vocab_size:
            message = f"token ids must be less than {limits.vocab_size}"
            raise invalid_value(request.param, f"Invalid value for '{request.param}': {message}.")
        encoded = [EncodedText(tuple(ids[:cut_to])) for ids in id_lists]
    else:
        try:
            encoded = await encode_texts(tokenizer, cast(Sequence[str], inputs), most, cut_to, run)
        except TextTooLong as error:
            raise context_length_exceeded(most, _place(request, error.args[0]), None, None) from None
        except NothingLeft:
            raise _nothing_left(request, cut_to) from None
    for index, (ids, _) in enumerate(encoded):
        if len(ids) > most:
            raise context_length_exceeded(most, _place(request, index), len(ids), None)
        if not ids:
            place = _place(request, index)
            raise invalid_value(place, f"Invalid value for '{place}': it must not be empty.")
    return encoded


def _place(request: VectorRequest, index: int) -> str:
    """Return the name of an input for an error. One of several has its index."""
    return request.param if len(request.inputs) == 1 else f"{request.param}[{index}]"


def _nothing_left(request: VectorRequest, cut_to: int | None) -> ApiError:
    others = "special tokens" if request.kind == "embedding" else "the query and special tokens"
    message = f"{cut_to} tokens have no room for '{request.param}' beside {others}"
    return invalid_value("truncate_prompt_tokens", f"Invalid value for 'truncate_prompt_tokens': {message}.")


def _answer(request: VectorRequest, request_id: str, service_tier: str) -> Answer:
    if isinstance(request, EmbeddingRequest):
        as_base64 = request.encoding_format == "base64"
        return EmbeddingAnswer(request.model, service_tier, as_base64, request.dimensions)
    assert isinstance(request, RerankRequest)
    texts = request.texts if request.return_documents else None
    answer_id = f"rerank-{request_id.removeprefix('req_')}"
    return RerankAnswer(request.model, service_tier, answer_id, request.top_n, texts)
