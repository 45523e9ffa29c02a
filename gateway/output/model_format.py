"""The formats of one model: which tool calls and which reasoning its chat template knows.

Knows chat templates and special tokens as texts; does not know requests.
"""

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass

from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from gateway.output.parser import parser_template
from gateway.output.tools.call_format import CallFormat, ReasoningFormat, reasoning_format
from gateway.output.tools.formats import call_format, named_call_format

DEFAULT_FORMAT = "hermes"  # of models whose chat template shows no format that is known; most others follow it
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """`shown` are the special tokens that are markers, as texts by token ids; `special_ids` are the ids of all of them.

    `with_calls` and `without_calls` are the regions of the model's output, with and without tools.
    """

    calls: CallFormat
    reasoning: ReasoningFormat | None
    special_ids: Mapping[str, int]
    shown: Mapping[int, str]
    with_calls: ResponseTemplate
    without_calls: ResponseTemplate

    @classmethod
    def of(cls, template: str, special_ids: Mapping[str, int], tool_parser: str = "auto") -> "ModelFormat":
        """Return the formats of a model by its chat template. `tool_parser` names another format of tool calls.

        Raises `KeyError` if there is no format of that name.
        """
        name = tool_parser if tool_parser != "auto" else DEFAULT_FORMAT
        calls = (call_format(template) if tool_parser == "auto" else None) or named_call_format(name)
        reasoning = reasoning_format(template)
        shown = _markers(calls, reasoning, special_ids)
        regions = parser_template(calls, reasoning), parser_template(None, reasoning)
        return cls(calls, reasoning, special_ids, shown, *regions)

    def new_call_id(self) -> str:
        if self.calls.id_length is None:
            return "call_" + secrets.token_hex(12)
        return "".join(secrets.choice(_ID_CHARS) for _ in range(self.calls.id_length))


def _markers(calls: CallFormat, reasoning: ReasoningFormat | None, special_ids: Mapping[str, int]) -> dict[int, str]:
    texts = [calls.before, calls.written, calls.after, calls.close or "", calls.trigger, *calls.markers]
    if reasoning is not None:
        texts += [reasoning.open, reasoning.close, reasoning.lead, *reasoning.text]
    return {id: token for token, id in special_ids.items() if any(token in text for text in texts)}
