"""How model families write reasoning; the family of a model is found by its chat template."""

from dataclasses import dataclass


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
