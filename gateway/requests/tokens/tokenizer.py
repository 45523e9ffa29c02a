"""Convert text to tokens and back: the chat template, encoding, and decoding token by token.

Knows the model's tokenizer; does not know requests, tiers or stop strings. Uses the tokenizers of transformers without
torch, because the gateway has to start within one or two seconds, and also on machines without torch.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from gateway.protocol.json_body import is_large
from gateway.requests.tokens.decoder import NO_TOKENS, IncrementalDecoder
from gateway.requests.tokens.model_files import read_max_model_len
from gateway.requests.tokens.token_text import TokenTexts

INLINE_CHARS = 8_000  # characters, about 2 ms of encoding; longer input is encoded in a thread, off the event loop
LONG_CHARS = 2**16  # characters, about 25 ms of encoding
TEXT_CHARS = 50  # fixed cost of each text (call and template), as the number of characters that cost the same time
_PLAIN_CHAT: Mapping[str, Any] = {}  # the values of a chat that has only messages
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, KeyError, RecursionError)
MAX_IDS = 2**20  # token ids of one text; to return them takes 20 ms, in which no other thread runs
CUT_MARGIN = 64  # tokens beside a cut, which may not be those of the whole text
# Names of files in a model's directory that hold no tokenizer, as in one of a configuration alone.
_NO_TOKENIZER = re.compile(r"(generation_)?config\.json|.*\.safetensors(\.index\.json)?")


class ChatTemplateError(Exception):
    """The model's chat template does not accept these messages, or the model has none."""


class TextTooLong(Exception):
    """The text is so long that it has too many tokens in every encoding, or it has more than `MAX_IDS`."""


class Truncation(NamedTuple):
    """Which tokens of a prompt are kept: its first ones, or its last ones."""

    num_tokens: int
    keeps_first: bool

    def kept(self, ids: list[int]) -> list[int]:
        return ids[: self.num_tokens] if self.keeps_first else ids[-self.num_tokens :]


T = TypeVar("T")


class RunInThread(Protocol):
    """A function that calls `work` in a thread, and returns the result. `is_long`: the work may take over 25 ms."""

    async def __call__(self, work: Callable[[], T], *, is_long: bool) -> T: ...


async def in_thread(work: Callable[[], T], *, is_long: bool) -> T:
    """Call `work` in a thread that is used for everything."""
    return await asyncio.to_thread(work)


class Tokenizer:
    """The tokenizer of one model. Several threads may use it at the same time."""

    def __init__(self, pretrained: Any, max_model_len: int | None = None) -> None:
        self._pretrained = pretrained
        self.backend = pretrained.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocabulary))
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.max_model_len = max_model_len
        self._template: str | None = pretrained.chat_template
        added = self.backend.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self._knows_developer = "developer" in (self._template or "")

    @classmethod
    def load(cls, model: str) -> "Tokenizer":
        """Load the tokenizer of `model`, which is a transformers directory or a hub id.

        Raises `OSError` or `ValueError` if there is no tokenizer.
        """
        return cls(_load_pretrained(model), read_max_model_len(model))

    @property
    def config(self) -> dict[str, Any]:
        """What the model's files say of the tokenizer, as JSON. Names of files are left out."""
        given = {name: v for name, v in self._pretrained.init_kwargs.items() if not name.endswith(("_file", "_path"))}
        template = {"chat_template": self._template} if self._template else {}
        kind = type(self._pretrained).__name__
        config: dict[str, Any] = json.loads(json.dumps({"tokenizer_class": kind, **given, **template}, default=str))
        return config

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.backend)

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if the model has none."""
        return self._template or ""

    @cached_property
    def _takes_late_system(self) -> bool:
        """Whether the chat template writes a system message that comes after others.

        Some templates refuse it, and some write no system message but the first.
        """
        turns = (("user", "a"), ("assistant", "b"), ("system", "late"), ("user", "c"))
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            return "late" in self._pretrained.apply_chat_template(messages, tokenize=False)
        except _TEMPLATE_FAULTS:
            return False

    def generation_prompt(self, values: Mapping[str, Any]) -> str:
        """Return what the chat template writes at the end of a prompt, as the beginning of the assistant's answer.

        `values` are the template's values beside the messages. The result is empty if the template fails.
        """
        messages = [{"role": "user", "content": "a"}]
        try:
            with_prompt = self._render(messages, values)
            return with_prompt.removeprefix(self._render(messages, {**values, "add_generation_prompt": False}))
        except ChatTemplateError:
            return ""

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        max_tokens: int,
        *,
        values: Mapping[str, Any] = _PLAIN_CHAT,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
        run: RunInThread = in_thread,
    ) -> list[int]:
        """Return the token ids of the prompt that the chat template makes of `messages` and of `values`.

        Without other `values`, the prompt ends at the place where the assistant's answer begins. Most templates write
        the special tokens themselves. `run` is used for all but a short chat. Raises `ChatTemplateError` if the
        template fails, and `TextTooLong` if the text certainly has more than `max_tokens` tokens and is not truncated.
        """
        if truncation is None:
            self.check_length(sum(len(message["content"]) for message in messages), max_tokens)

        def encode() -> list[int]:
            text = self._render(messages, values)
            return self._encode(text, max_tokens, add_special_tokens, truncation)

        parts = [part for message in messages for part in message.values()]
        size = time_of([part for part in parts if isinstance(part, str)])
        others = [part for part in parts if not isinstance(part, str)]  # tool calls
        if not others and not values and size <= INLINE_CHARS:
            return encode()
        return await run(encode, is_long=size > LONG_CHARS or is_large([others, dict(values)], LONG_CHARS))

    async def encode(
        self,
        texts: Sequence[str],
        max_tokens: int,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
        run: RunInThread = in_thread,
    ) -> list[list[int]]:
        """Return the token ids of each text, by default with the special tokens with which a prompt begins.

        `run` is used for all but short texts. Raises `TextTooLong` if one of the texts certainly has more than
        `max_tokens` tokens and is not truncated.
        """
        if truncation is None:
            for text in texts:
                self.check_length(len(text), max_tokens)

        def encode() -> list[list[int]]:
            return [self._encode(text, max_tokens, add_special_tokens, truncation) for text in texts]

        size = time_of(texts)
        return encode() if size <= INLINE_CHARS else await run(encode, is_long=size > LONG_CHARS)

    async def count(self, texts: Sequence[str]) -> int:
        """Return how many tokens the texts have together, without special tokens. They are encoded in a thread."""

        def count() -> int:
            # One by one, because the backend would encode many at a time, on all cores.
            return sum(len(self.backend.encode_batch_fast([t], add_special_tokens=False)[0]) for t in texts)

        return await asyncio.to_thread(count)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it. Ids that are not in the vocabulary become empty strings."""

        def look_up() -> list[str]:
            return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

        return look_up() if len(token_ids) <= INLINE_CHARS else await asyncio.to_thread(look_up)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole output or prompt, with its special tokens."""
        # As a batch of one, because the backend's `decode` would hold the GIL during the whole call.
        decode = partial(self.backend.decode_batch, [list(token_ids)], skip_special_tokens=False)
        [text] = decode() if len(token_ids) <= INLINE_CHARS else await asyncio.to_thread(decode)
        return str(text)

    def decoder(self, shown: Mapping[int, str] = NO_TOKENS, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """Return a decoder. If it skips special tokens, it shows those of `shown`, which are texts by token ids."""
        return IncrementalDecoder(self.backend, shown, skip_special_tokens)

    def check_length(self, num_chars: int, max_tokens: int) -> None:
        """Raise `TextTooLong` for a text of so many characters that it has more than `max_tokens` in every encoding."""
        if num_chars > max_tokens * self._longest_token:
            raise TextTooLong

    def _render(self, messages: Sequence[dict[str, Any]], values: Mapping[str, Any]) -> str:
        if self._template is None and "chat_template" not in values:
            raise ChatTemplateError("This model has no chat template. Use /v1/completions.")
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if any(m["role"] == "system" for m in messages[1:]) and "chat_template" not in values:
            messages = messages if self._takes_late_system else _with_system_first(messages)
        try:
            values = {"add_generation_prompt": True, **values}
            text: str = self._pretrained.apply_chat_template(messages, tokenize=False, **values)
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(_template_message(error)) from error
        return text

    def _encode(self, text: str, max_tokens: int, add_special_tokens: bool, truncation: Truncation | None) -> list[int]:
        if truncation is None:
            self.check_length(len(text), max_tokens)
        else:
            text = self.cut(text, min(truncation.num_tokens, max_tokens + 1), truncation.keeps_first)
        # The backend is called directly, because the wrapper of transformers sets truncation on every call, which is
        # not safe in threads. The text is passed as a batch of one, because the backend's `encode` would hold the GIL
        # during the whole call.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > MAX_IDS:
            raise TextTooLong
        return encoding.ids if truncation is None else truncation.kept(encoding.ids)

    def cut(self, text: str, num_tokens: int, keeps_first: bool) -> str:
        """Return a part of `text` that has its first or its last `num_tokens` tokens."""
        num_chars = (num_tokens + CUT_MARGIN) * self._longest_token
        return text[:num_chars] if keeps_first else text[-num_chars:]


def _with_system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with all system messages as one, before the others."""
    texts = [m["content"] for m in messages if m["role"] == "system"]
    return [{"role": "system", "content": "\n".join(texts)}, *(m for m in messages if m["role"] != "system")]


def time_of(texts: Sequence[str]) -> int:
    """Return the time that the texts take, in characters."""
    return sum(map(len, texts)) + TEXT_CHARS * len(texts)


def _template_message(error: Exception) -> str:
    """Return the error message for the user.

    If the template called `raise_exception`, this is the template's own message. Otherwise it is a general message.
    """
    if type(error) is TemplateError:
        return str(error)
    return "The model's chat template does not accept these messages."


def _load_pretrained(model: str) -> Any:
    directory = Path(model)
    if not directory.is_dir() and (directory.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise OSError("there is no such directory")
    if directory.is_dir() and not (directory / "tokenizer.json").exists():
        names = {path.name for path in directory.iterdir()}
        if all(map(_NO_TOKENIZER.fullmatch, names)) or names.isdisjoint(("config.json", "tokenizer_config.json")):
            raise OSError("it has no file of a tokenizer")
        from transformers import AutoTokenizer  # can convert older formats, but imports torch

        return AutoTokenizer.from_pretrained(model)
    return PreTrainedTokenizerFast.from_pretrained(model)
