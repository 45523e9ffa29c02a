"""What a request says about the text and the tokens of its answer, and the choices that keep to it.

Knows the options of bodies and the tokenizer; does not know tokens' events or formats of answers.
"""

from dataclasses import dataclass

from gateway.output.piece import Piece, ReportedToken
from gateway.output.plan import OutputPlan
from gateway.protocol.bodies.schemas import AnyRequest, ChatCompletionRequest, CompletionRequest
from gateway.requests.answers.choice import Choice, TokenTracker
from gateway.requests.tokens.stop_strings import StopMatcher
from gateway.requests.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    shows_stop: bool = False  # whether the text includes the stop string or stop token that ends it
    min_tokens: int = 0
    skip_special_tokens: bool = True
    decodes: bool = True  # false: the answer has no text
    hides_reasoning: bool = False  # whether the tokens of the reasoning are not reported
    reports_tokens: bool = False
    reports_end: bool = False  # whether a token that ends the output is reported, as /v1/completions of vLLM does
    reports_ids: bool = False  # of all tokens, also of those whose text is not shown
    echo: bool = False
    echoed: str = ""  # text before the output that is no prompt: the last message of a chat
    only_prompt: bool = False

    def choice(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        prompt_text: str | None,
        plan: OutputPlan,
    ) -> Choice:
        """Return a new choice for a prompt. `prompt_text` is the prompt as the client sent it (None: as token ids)."""
        choice = Choice(
            index,
            tokenizer.decoder(plan.shown, skip_special_tokens=self.skip_special_tokens) if self.decodes else None,
            StopMatcher(self.stops, self.shows_stop) if self.stops else None,
            plan.new_parser(),
            plan.calls_finish,
            self.hides_reasoning,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            hidden_ids=self._hidden_ids(tokenizer),
            only_prompt=self.only_prompt,
            prompt_tokens=len(prompt_ids),
        )
        if self.echo or self.echoed or self.reports_ids:
            choice.first = self._first(tokenizer, prompt_ids, prompt_text)
        if self.reports_tokens or self.reports_ids:
            num_before = len(choice.first.text) if choice.first is not None else 0
            reports_all = self.reports_ids or not self.decodes
            choice.tracker = TokenTracker(num_before, reports_all=reports_all, reports_end=self.reports_end)
        return choice

    def _hidden_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the tokens that are not shown at the end. Special tokens that are skipped anyway need no listing."""
        if self.shows_stop:
            return frozenset()
        return (
            self.stop_token_ids
            if self.skip_special_tokens
            else self.stop_token_ids | frozenset(tokenizer.special_tokens.values())
        )

    def _first(self, tokenizer: Tokenizer, prompt_ids: tuple[int, ...], prompt_text: str | None) -> Piece:
        first = Piece(self.echoed, prompt_token_ids=prompt_ids if self.reports_ids else ())
        if self.echo:
            texts = _decoded_one_by_one(tokenizer, prompt_ids)
            first.text = "".join(texts) if prompt_text is None else prompt_text
            first.tokens = _prompt_tokens(prompt_ids, texts, first.text) if self.reports_tokens else []
        return first


def answer_options(request: AnyRequest) -> AnswerOptions:
    completion = request if isinstance(request, CompletionRequest) else None
    return AnswerOptions(
        stops=request.stop_strings,
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        shows_stop=bool(request.include_stop_str_in_output),
        min_tokens=request.min_tokens or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
        decodes=request.detokenize is not False,
        hides_reasoning=isinstance(request, ChatCompletionRequest) and request.include_reasoning is False,
        reports_tokens=request.num_logprobs is not None or request.chooses_best,
        reports_end=completion is not None,
        reports_ids=bool(request.return_token_ids),
        echo=completion is not None and bool(completion.echo),
        echoed="" if isinstance(request, CompletionRequest) else request.echoed,
        only_prompt=completion is not None and completion.max_tokens == 0,
    )


def _decoded_one_by_one(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> list[str]:
    """Return the text that each token adds. Half a character adds nothing, its last token adds all of it."""
    decoder = tokenizer.decoder(skip_special_tokens=False)
    texts = [decoder.feed((token_id,)) for token_id in token_ids]
    if texts:
        texts[-1] += decoder.flush()
    return texts


def _prompt_tokens(token_ids: tuple[int, ...], texts: list[str], whole: str) -> list[ReportedToken]:
    """Return the tokens of a prompt with their places in its text, `whole`.

    Tokens that are not in the text, such as one for its beginning, take no place.
    """
    tokens, offset = [], 0
    for token_id, text in zip(token_ids, texts, strict=True):
        tokens.append(ReportedToken(token_id, offset, is_prompt=True))
        offset += len(text) if whole.startswith(text, offset) else 0
    return tokens
