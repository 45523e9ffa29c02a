"""How model families write tool calls, as one table; the family of a model is found by its chat template.

Knows markers and the text between them; does not know tokens, requests or answers. Each row follows the family's own
chat template, and gives both directions: how calls are read, and how they are written (for grammars that force calls).

To add a family, add a row to `CALL_FORMATS`, and one to the table of tests/gateway/output/families.py.
"""

import regex

from gateway.output.tools.call_format import CallFormat, Keywords, Tags


def _pattern(text: str) -> "regex.Pattern[str]":
    return regex.compile(text, regex.DOTALL)


# The beginning of a call that is one JSON object: `{"name": "…", "arguments": `, before the `{` of the arguments.
_OBJECT_HEADER = _pattern(
    r'\{\s*"(?:name|tool_name)"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME = r"[\w.-]+"
_OBJECT_CALL = '{{"name": "{name}", "arguments": {arguments}}}'
_FUNCTION_TAGS = Tags(
    _pattern(r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"),
    "</parameter>",
    _pattern(r"\s*</function>"),
    "<parameter={key}>\n{value}\n</parameter>\n",
)
_PYTHON_HEADER = _pattern(rf"(?P<name>{_NAME})\(")
_PYTHON_CALL = "{name}({arguments})"
_PYTHON_KEYWORDS = Keywords("=", ", ", ")")

# The first row with all signs in the template is taken, so rows with more particular signs come first.
CALL_FORMATS: tuple[CallFormat, ...] = (
    CallFormat(
        "harmony",  # gpt-oss
        ("<|channel|>", "to=functions."),
        "",
        "<|call|>",
        _pattern(rf" to=functions\.(?P<name>{_NAME})(?:<\|channel\|>\w+)?[^<]*(?:<\|constrain\|>\w+)?<\|message\|>"),
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        open=r"(?:(?:<\|start\|>assistant)?<\|channel\|>(?:commentary|analysis)|<\|start\|>assistant)"
        r"(?= to=functions\.)",
    ),
    CallFormat(
        "minimax_m2",
        ("<minimax:tool_call>",),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _pattern(r'<invoke name="(?P<name>[^"]+)">'),
        '<invoke name="{name}">\n{arguments}</invoke>\n',
        separator="",
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
        tags=Tags(
            _pattern(r'\s*<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
            "</parameter>",
            _pattern(r"\s*</invoke>"),
            '<parameter name="{key}">{value}</parameter>\n',
        ),
    ),
    CallFormat(
        "seed_oss",
        ("<seed:tool_call>",),
        "<seed:tool_call>",
        "</seed:tool_call>",
        _pattern(r"<function=(?P<name>[^>]+)>"),
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        tags=_FUNCTION_TAGS,
    ),
    CallFormat(
        "qwen3_coder",  # also Qwen3.5, Nemotron 3, MiMo, Step 3.5
        ("<tool_call>", "<function="),
        "<tool_call>",
        "</tool_call>",
        _pattern(r"<function=(?P<name>[^>]+)>"),
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        tags=_FUNCTION_TAGS,
    ),
    CallFormat(
        "glm",  # GLM-4.5 and later
        ("<tool_call>", "<arg_key>"),
        "<tool_call>",
        "</tool_call>",
        _pattern(r"\s*(?P<name>[^\s<]+)(?=[\s<])"),
        "<tool_call>{name}\n{arguments}</tool_call>",
        tags=Tags(
            _pattern(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
            "</arg_value>",
            _pattern(r"(?!)"),  # the call ends with its region
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ),
    ),
    CallFormat(
        "hermes",  # Hermes, Qwen2.5, Qwen3, Granite 4 and many others
        ("<tool_call>",),
        "<tool_call>",
        "</tool_call>",
        _OBJECT_HEADER,
        f"<tool_call>\n{_OBJECT_CALL}\n</tool_call>",
    ),
    CallFormat(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _pattern(r"<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "deepseek_v3_1",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _pattern(r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>"),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        separator="",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _pattern(
            rf"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>{_NAME})(?::\d+)?\s*<\|tool_call_argument_begin\|>"
        ),
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        separator="",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    CallFormat(
        "mistral",  # Mistral Small 3.2, Magistral, Devstral
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        None,
        _pattern(rf"(?P<name>{_NAME})(?:\[CALL_ID\]\w+)?\[ARGS\]"),
        "[TOOL_CALLS]{name}[ARGS]{arguments}",
        separator="",
        markers=("[CALL_ID]",),
        id_length=9,
    ),
    CallFormat(
        "mistral_list",  # Mistral 7B v0.3, Nemo, Mixtral 8x22B, Small until 3.1
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        None,
        _OBJECT_HEADER,
        _OBJECT_CALL,
        separator=", ",
        before="[TOOL_CALLS] [",
        after="]",
        id_length=9,
    ),
    CallFormat(
        "tool_calls_list",  # Jamba, Hunyuan
        ("<tool_calls>",),
        "<tool_calls>",
        "</tool_calls>",
        _OBJECT_HEADER,
        _OBJECT_CALL,
        separator=", ",
        before="<tool_calls>[",
        after="]</tool_calls>",
    ),
    CallFormat(
        "cohere",
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _OBJECT_HEADER,
        '{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}',
        separator=",\n",
        before="<|START_ACTION|>[\n",
        after="\n]<|END_ACTION|>",
    ),
    CallFormat(
        "phi4_mini",
        ("<|tool|>", "<|/tool|>"),
        "<|tool_call|>",
        "<|/tool_call|>",
        _OBJECT_HEADER,
        _OBJECT_CALL,
        separator=", ",
        before="<|tool_call|>[",
        after="]<|/tool_call|>",
        open=r"<\|tool_call\|>|functools(?=\[)",
    ),
    CallFormat(
        "granite",  # Granite 3
        ("<|tool_call|>",),
        "<|tool_call|>",
        None,
        _OBJECT_HEADER,
        _OBJECT_CALL,
        separator=", ",
        before="<|tool_call|>[",
        after="]",
        open=r"<\|tool_call\|>|<tool_call>",
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>",),
        "<|tool_call>",
        "<tool_call|>",
        _pattern(rf"call:(?P<name>{_NAME})\{{"),
        "<|tool_call>call:{name}{{{arguments}}}<tool_call|>",
        separator="",
        keywords=Keywords(":", ",", "}", '<|"|>'),
        markers=('<|"|>',),
    ),
    CallFormat(
        "functiongemma",
        ("<start_function_call>",),
        "<start_function_call>",
        "<end_function_call>",
        _pattern(rf"call:(?P<name>{_NAME})\{{"),
        "<start_function_call>call:{name}{{{arguments}}}<end_function_call>",
        separator="",
        keywords=Keywords(":", ",", "}", "<escape>"),
        markers=("<escape>",),
    ),
    CallFormat(
        "olmo3",
        ("<function_calls>",),
        "<function_calls>",
        "</function_calls>",
        _PYTHON_HEADER,
        _PYTHON_CALL,
        before="<function_calls>",
        after="</function_calls>",
        keywords=_PYTHON_KEYWORDS,
    ),
    CallFormat(
        "lfm2",
        ("<|tool_call_start|>",),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        _PYTHON_HEADER,
        _PYTHON_CALL,
        separator=", ",
        before="<|tool_call_start|>[",
        after="]<|tool_call_end|>",
        keywords=_PYTHON_KEYWORDS,
    ),
    CallFormat(
        "pythonic",  # Llama 3.2, Llama 4, Gemma 3, ToolACE: the list of calls is the whole output
        ("[func_name1(",),
        "",
        None,
        _PYTHON_HEADER,
        _PYTHON_CALL,
        separator=", ",
        before="[",
        after="]",
        keywords=_PYTHON_KEYWORDS,
        markers=("<|python_start|>", "<|python_end|>"),
        open=rf"<\|python_start\|>|\A\s*(?=\[\s*{_NAME}\()",
    ),
    CallFormat(
        "llama3_json",  # Llama 3.1 to 3.3, Llama 4 in JSON: the JSON object is mostly the whole output
        ("ipython", '"parameters": '),
        "",
        None,
        _OBJECT_HEADER,
        '{{"name": "{name}", "parameters": {arguments}}}',
        separator="; ",
        markers=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        open=r'<\|python_(?:tag|start)\|>|\s*(?=\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:\s*\{)',
    ),
)

CALL_FORMAT_NAMES = tuple(row.name for row in CALL_FORMATS)


def call_format(template: str) -> CallFormat | None:
    """Return the format of the tool calls in a chat template; None if it has none that is known."""
    return next((row for row in CALL_FORMATS if all(sign in template for sign in row.signs)), None)


def named_call_format(name: str) -> CallFormat:
    """Return the format with this name. Raises `KeyError` if there is none."""
    return {row.name: row for row in CALL_FORMATS}[name]
