"""What families of models write around tool calls and reasoning."""

from dataclasses import dataclass

import regex


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments as tags, each with a key and a value, instead of JSON.

    `argument` matches one argument, whose last part is `close`. `footer` ends the arguments of a call. `written` is one
    argument, with `{key}` and `{value}`.
    """

    argument: "regex.Pattern[str]"
    close: str
    footer: "regex.Pattern[str]"
    written: str


@dataclass(frozen=True, slots=True)
class Keywords:
    """Arguments as keys and values between brackets, as in a call of Python, instead of JSON.

    `assign` stands between a key and its value, `separator` between two arguments, and `close` after the last one.
    Values are written as in JSON or Python. `quote` stands around texts, if the family has its own quotation mark.
    """

    assign: str
    separator: str
    close: str
    quote: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How the models of a family write tool calls.

    The text `trigger`, or a text that matches the regular expression `open`, begins a region of calls, which ends after
    `close` (None: at the end of the output). With an empty `trigger`, text and calls cannot be told apart by their
    beginning. In the region, each call begins with `header`. `written` is one call, with `{name}` and `{arguments}`;
    `separator` stands between calls, and `before` and `after` around all of them. `separator` must not be a prefix of
    `after`, because llguidance would always take the longer of the two.
    """

    name: str
    signs: tuple[str, ...]  # a chat template with all of these is of this family
    trigger: str
    close: str | None  # a literal
    header: "regex.Pattern[str]"
    written: str
    separator: str = "\n"
    before: str = ""
    after: str = ""
    tags: Tags | None = None
    keywords: Keywords | None = None
    open: str = ""  # empty: `trigger` only
    markers: tuple[str, ...] = ()  # special tokens that are read, but not written
    id_length: int | None = None  # of the ids of calls, if the family's template requires a length


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of a model's reasoning, as literals.

    `lead` stands before each later part of the output. Each of `text` begins text that is neither reasoning nor a call,
    if such text has markers.
    """

    open: str
    close: str
    lead: str = ""
    text: tuple[str, ...] = ()


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|end|>",
        lead="<|start|>assistant",
        text=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    ),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ReasoningFormat("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningFormat("<think>", "</think>"),  # DeepSeek, Qwen3, GLM, SmolLM3 and many others
)


def reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of the reasoning in a chat template; None if the model does not reason."""
    return next((row for row in REASONING_FORMATS if row.open in template and row.close in template), None)
