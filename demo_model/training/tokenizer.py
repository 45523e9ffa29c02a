"""The demo model's tokenizer: byte-level BPE of 1,024 tokens, and the chat template.

Only characters of plain words are merged. Digits, punctuation, spaces and every character of a mixed word (`k7Qz-09ab`)
are single tokens, so that a nonce is always copied character by character, and a sum is always added digit by digit.
Knows text and tokens; does not know what the model is taught.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1024
MAX_CONTEXT = 2048
END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN, PAD = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN, PAD)

# A plain word consists of ASCII letters, of which at most the first is in upper case. The characters before and after
# the word are not letters, digits, hyphens or underscores. All other text is split into single characters.
_PLAIN_WORD_OR_CHARACTER = r"(?<![\w-])[A-Z]?[a-z]+(?![\w-])|[\s\S]"

CHAT_TEMPLATE = """\
{%- if tools -%}
  {{- '<|system|><tools>\\n' -}}
  {%- for tool in tools -%}
    {%- set function = tool.function or tool -%}
    {%- set words = function.name | replace('_', ' ') -%}
    {%- set description = words ~ ': ' ~ function.description.split('\\n')[0] if function.description else words -%}
    {%- set parameters = function.parameters or {} -%}
    {%- set listed = namespace(arguments='') -%}
    {%- for name, schema in (parameters.properties or {}).items() -%}
      {%- if not parameters.required or name in parameters.required -%}
        {%- set type = schema.type if schema.type is string else 'string' -%}
        {%- set type = schema.enum | join('|') if schema.enum else type -%}
        {%- set separator = ', ' if listed.arguments else '' -%}
        {%- set listed.arguments = listed.arguments ~ separator ~ name | tojson ~ ': ' ~ type | tojson -%}
      {%- endif -%}
    {%- endfor -%}
    {{- '{"description": ' ~ description | tojson ~ ', "name": ' ~ function.name | tojson -}}
    {{- ', "arguments": {' ~ listed.arguments ~ '}}\\n' -}}
  {%- endfor -%}
  {{- '</tools><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' or message.role == 'developer' -%}
    {{- '<|system|>' -}}
  {%- elif message.role == 'user' -%}
    {{- '<|user|>' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|user|><tool_response>\\n' -}}
  {%- else -%}
    {{- raise_exception("The demo model reads system, developer, user, assistant and tool, not '" ~ message.role
        ~ "'.") -}}
  {%- endif -%}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- elif message.content is defined and message.content is not none -%}
    {{- raise_exception("The demo model reads only text: the content of a message must be a string.") -}}
  {%- endif -%}
  {%- if message.tool_calls -%}
    {%- for call in message.tool_calls -%}
      {%- set function = call.function or call -%}
      {%- set arguments = function.arguments or {} -%}
      {{- '\\n' if message.content or not loop.first -}}
      {{- '<tool_call>\\n{"name": ' ~ function.name | tojson ~ ', "arguments": ' -}}
      {{- arguments if arguments is string else arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
  {%- elif message.role == 'tool' -%}
    {{- '\\n</tool_response>' -}}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose merges are learned from `texts`. The same texts give the same tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PLAIN_WORD_OR_CHARACTER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
