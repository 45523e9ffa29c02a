"""The record of one request, and the reader that fills it from the bytes of the response as they arrive.

Sans-I/O: gets bytes with the time at which the socket delivered them. Knows OpenAI's chunks and errors; not
connections. Times are seconds on the caller's clock.
"""

from dataclasses import dataclass, field

import msgspec


@dataclass(slots=True)
class Outcome:
    """What became of one request. Owned by the exchange that sends it, until `finished_s` or `error` is set.

    `progress` holds (time, completion tokens so far) of each event that brought some. Times to a token or the end
    count from when the request was due: a client that falls behind must not make the server look faster.
    """

    traffic_class: str
    index: int
    due_s: float  # when the request should have been sent
    sent_s: float = 0.0
    finished_s: float | None = None
    given_up_s: float | None = None  # when the client stopped waiting for an open-loop request
    status: int = 0
    error: str | None = None
    progress: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    service_tier: str | None = None
    finish_reason: str | None = None
    retry_after_s: float | None = None

    @property
    def is_complete(self) -> bool:
        return self.finished_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first event with output; where the request was given up before, the time it had waited, a
        lower bound. None without either."""
        first_s = self.progress[0][0] if self.progress else self.given_up_s
        return None if first_s is None else first_s - self.due_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds to the end; where the request was given up, the time it had waited. None without either."""
        end_s = self.finished_s if self.finished_s is not None else self.given_up_s
        return None if end_s is None else end_s - self.due_s

    def inter_token_s(self) -> list[float]:
        """Return the gap before each token after the first event.

        The first token of an event waited the whole gap, the others of that event nothing, so that a stall is never
        averaged away.
        """
        gaps: list[float] = []
        for (before_s, had), (now_s, has) in zip(self.progress, self.progress[1:], strict=False):
            gaps.append(now_s - before_s)
            gaps.extend([0.0] * (has - had - 1))
        return gaps

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Return the output tokens that arrived in [start_s, end_s)."""
        count, had = 0, 0
        for at_s, has in self.progress:
            if start_s <= at_s < end_s:
                count += has - had
            had = has
        return count


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        if self.text is not None:
            return self.text
        part = self.delta or self.message
        return (part.content if part else None) or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Body(msgspec.Struct):
    """The fields that are read of a chunk, of a whole answer, and of an error."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    service_tier: str | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Body)


class AnswerReader:
    """Reads a response body into an `Outcome`."""

    def __init__(self, outcome: Outcome, streamed: bool) -> None:
        self.outcome = outcome
        self._streamed = streamed
        self._buffer = b""
        self._text: list[str] = []

    def feed(self, data: bytes, now_s: float) -> None:
        self._buffer += data
        if not self._streamed:
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:  # OpenAI's events are one `data:` line each; ends are LF or CRLF
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), now_s)

    def expect_whole(self) -> None:
        """The response is one JSON body after all, such as an error before the stream began."""
        self._streamed = False

    def finish(self, now_s: float) -> None:
        """The response ended as HTTP requires."""
        outcome = self.outcome
        if not self._streamed:
            self._read_whole_answer(now_s)
        elif outcome.finish_reason is None and outcome.error is None:
            outcome.error = "stream ended without a finish_reason"
        outcome.text = "".join(self._text)
        outcome.finished_s = now_s

    def _read_event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            return
        body = self._decode(payload)
        text = self._read_body(body)
        outcome = self.outcome
        had = outcome.progress[-1][1] if outcome.progress else 0
        # Without running usage an event with text counts as one token.
        has = outcome.completion_tokens if body.usage else had + bool(text)
        if text or has > had:
            outcome.progress.append((now_s, max(has, had)))
        outcome.completion_tokens = max(outcome.completion_tokens, has)

    def _read_whole_answer(self, now_s: float) -> None:
        self._read_body(self._decode(self._buffer))
        outcome = self.outcome
        if outcome.status != 200 and outcome.error is None:
            outcome.error = f"HTTP {outcome.status}"
        if outcome.error is None and outcome.completion_tokens:
            outcome.progress.append((now_s, outcome.completion_tokens))

    def _read_body(self, body: _Body) -> str:
        """Take over the fields of a body except the times of its tokens. Return its text."""
        outcome = self.outcome
        if body.error is not None:
            outcome.error = f"{body.error.code or outcome.status}: {body.error.message}"
        if body.usage is not None:
            outcome.prompt_tokens = body.usage.prompt_tokens
            outcome.completion_tokens = body.usage.completion_tokens
        outcome.service_tier = body.service_tier or outcome.service_tier
        text = ""
        for choice in body.choices:
            text += choice.content
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if text:
            self._text.append(text)
        return text

    def _decode(self, payload: bytes) -> _Body:
        try:
            return _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            self.outcome.error = f"not an OpenAI answer: {error}"
            return _Body()
