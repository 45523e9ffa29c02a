"""How chat templates of model families render an assistant's tool calls, after the relevant lines of the templates."""

import json
from dataclasses import dataclass
from typing import Any

import jinja2

_EACH = "{% for call in calls %}"
_LINE = "{{ '\n' if not loop.last }}"
_END = "{% endfor %}"
_OBJECT = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
_LIST = _EACH + _OBJECT + '{{ ", " if not loop.last }}' + _END
_FUNCTION_TAGS = (
    "<function={{ call.name }}>\n{% for key, value in call.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>"
)


@dataclass(frozen=True)
class Family:
    """`template` renders `calls`; `one` is true if the family's models make only one call at a time."""

    format: str
    template: str
    one: bool = False

    def render(self, calls: list[dict[str, Any]]) -> str:
        environment = jinja2.Environment()
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string(self.template).render(calls=calls)


_KEYWORDS = (
    "{% for key, value in call.arguments.items() %}{{ key }}={{ value | tojson }}"
    '{{ ", " if not loop.last }}{% endfor %}'
)
_PYTHON = "{{ call.name }}(" + _KEYWORDS + ")"
_GEMMA = (
    "call:{{ call.name }}{{ '{' }}{% for key, value in call.arguments.items() %}{{ key }}:"
    "{{ QUOTE + value + QUOTE if value is string else value }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
)


FAMILIES = (
    Family("hermes", _EACH + "<tool_call>\n" + _OBJECT + "\n</tool_call>" + _LINE + _END),
    Family("qwen3_coder", _EACH + "<tool_call>\n" + _FUNCTION_TAGS + "\n</tool_call>" + _LINE + _END),
    Family("seed_oss", _EACH + "<seed:tool_call>\n" + _FUNCTION_TAGS + "\n</seed:tool_call>" + _LINE + _END),
    Family(
        "glm",
        _EACH + "\n<tool_call>{{ call.name }}{% for key, value in call.arguments.items() %}\n"
        "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>{% endfor %}\n</tool_call>" + _END,
    ),
    Family(
        "minimax_m2",
        "<minimax:tool_call>\n"
        + _EACH
        + '<invoke name="{{ call.name }}">\n{% for key, value in call.arguments.items() %}'
        '<parameter name="{{ key }}">{{ value }}</parameter>\n{% endfor %}</invoke>\n' + _END + "</minimax:tool_call>",
    ),
    Family(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>"
        + _EACH
        + "{{ '\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}"
        "\n```json\n{{ call.arguments | tojson }}\n```<｜tool▁call▁end｜>" + _END + "<｜tool▁calls▁end｜>",
    ),
    Family(
        "deepseek_v3_1",
        "<｜tool▁calls▁begin｜>"
        + _EACH
        + "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}"
        "<｜tool▁call▁end｜>" + _END + "<｜tool▁calls▁end｜>",
    ),
    Family(
        "kimi_k2",
        "<|tool_calls_section_begin|>" + _EACH + "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ call.arguments | tojson }}<|tool_call_end|>"
        + _END
        + "<|tool_calls_section_end|>",
    ),
    Family("mistral", _EACH + "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}" + _END),
    Family("mistral_list", "[TOOL_CALLS] [" + _LIST + "]"),
    Family("tool_calls_list", "<tool_calls>[" + _LIST + "]</tool_calls>"),
    Family(
        "cohere",
        "<|START_ACTION|>[\n" + _EACH + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.name }}", '
        '"parameters": {{ call.arguments | tojson }}}{{ ",\n" if not loop.last }}' + _END + "\n]<|END_ACTION|>",
    ),
    Family("phi4_mini", "{# <|tool|> <|/tool|> #}<|tool_call|>[" + _LIST + "]<|/tool_call|>"),
    Family("granite", "<|tool_call|>[" + _LIST + "]"),
    Family("pythonic", "{# [func_name1( #}[" + _EACH + _PYTHON + '{{ ", " if not loop.last }}' + _END + "]"),
    Family(
        "lfm2", "<|tool_call_start|>[" + _EACH + _PYTHON + '{{ ", " if not loop.last }}' + _END + "]<|tool_call_end|>"
    ),
    Family("olmo3", "<function_calls>" + _EACH + _PYTHON + _LINE + _END + "</function_calls>"),
    Family("gemma4", _EACH + "<|tool_call>" + _GEMMA.replace("QUOTE", "'<|\"|>'") + "<tool_call|>" + _END),
    Family(
        "functiongemma",
        _EACH + "<start_function_call>" + _GEMMA.replace("QUOTE", "'<escape>'") + "<end_function_call>" + _END,
    ),
    Family(
        "llama3_json",
        '{# ipython #}{"name": "{{ calls[0].name }}", "parameters": {{ calls[0].arguments | tojson }}}',
        one=True,
    ),
    Family(
        "harmony",
        "<|channel|>commentary to=functions.{{ calls[0].name }} <|constrain|>json<|message|>"
        "{{ calls[0].arguments | tojson }}<|call|>",
        one=True,
    ),
)
