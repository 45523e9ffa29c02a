"""The record of one request, and a reader that fills it from the bytes of the response as they arrive.

Does no I/O: the caller passes bytes, with the time at which the socket delivered them. Knows the chunks and errors of
OpenAI's API; does not know connections. Times are seconds on the caller's clock.
"""

from dataclasses import dataclass, field

import msgspec


@dataclass(slots=True)
class Outcome:
    """The result of one request. While the request is under way, only the `send` call that sends it may change it.

    `progress` holds (time, completion tokens so far) for each event that brought tokens. TTFT and E2E count from the
    time at which the request was due: a client that falls behind must not make the server look faster.
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
        """Seconds from the due time to the first event with output.

        If the request was given up before its first event, this is the time that it had waited, which is a lower bound.
        None if neither is known.
        """
        first_s = self.progress[0][0] if self.progress else self.given_up_s
        return None if first_s is None else first_s - self.due_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the due time to the end of the answer.

        If the request was given up, this is the time that it had waited. None if neither is known.
        """
        end_s = self.finished_s if self.finished_s is not None else self.given_up_s
        return None if end_s is None else end_s - self.due_s

    def inter_token_s(self) -> list[float]:
        """Return the gap before each token that came after the first event, in seconds.

        If an event brings several tokens, the first of them has the whole gap since the previous event, and the others
        have gaps of 0. So a stall is never averaged away.
        """
        gaps: list[float] = []
        for (before_s, had), (now_s, has) in zip(self.progress, self.progress[1:], strict=False):
            gaps.append(now_s - before_s)
            gaps.extend([0.0] * (has - had - 1))
        return gaps

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Return the number of output tokens that arrived in [start_s, end_s)."""
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
    """The fields of a chunk, of a whole answer or of an error that the reader uses."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    service_tier: str | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Body)


class AnswerReader:
    """A reader that fills an `Outcome` from the body of a response, streamed or whole."""

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
        for line in lines:  # each OpenAI event is one `data:` line; lines end with LF or CRLF
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), now_s)

    def expect_whole(self) -> None:
        """Read the response as one JSON body, although a stream was requested.

        A server answers in this way if an error occurs before the stream begins.
        """
        self._streamed = False

    def finish(self, now_s: float) -> None:
        """Complete the outcome. Called only if the response is complete by the rules of HTTP."""
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
        # If an event with text has no usage field, it counts as one token.
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
        """Copy the fields of a body into the outcome, except the times of tokens. Return the text."""
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
