"""Chat templates that render tool calls in the manner of the models', one for each format. Written for these tests."""

import re

from tests.core.chat_templates import LLAMA31, QWEN3


def _template(calls: str, tools: str = "", head: str = "<|{}|>", end: str = "<|end|>", before: str = "\\n") -> str:
    """
    Args:
        calls: renders message.tool_calls.
        before: between text and calls.
    """
    begin, close = head.split("{}")
    return f"""\
{{%- if tools %}}{{{{- '{begin}system{close}' }}}}{{%- for tool in tools %}}{{{{- tool | tojson }}}}{{%- endfor %}}\
{{{{- '{end}' }}}}{{%- endif %}}
{{%- for message in messages %}}
{{{{- '{begin}' + message.role + '{close}' + (message.content or '') }}}}
{{%- if message.tool_calls %}}{{%- if message.content %}}{{{{- '{before}' }}}}{{%- endif %}}{calls}{{%- endif %}}
{{{{- '{end}' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '{begin}assistant{close}' }}}}{{%- endif %}}"""


_EACH = "{%- for call in message.tool_calls %}{%- set f = call.function %}"
_LINE = "{%- if not loop.first %}{{- '\\n' }}{%- endif %}"
_COMMA = "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"
_JSON = """{{- '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}' }}"""

XML = _template(
    _EACH
    + _LINE
    + "{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for key, value in f.arguments.items() %}"
    + "{{- '<parameter=' + key + '>\\n' }}"
    + "{{- (value | tojson) if value is mapping or (value is iterable and value is not string) else (value | string) }}"
    + "{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}"
)
GLM = _template(
    _EACH
    + _LINE
    + "{{- '<tool_call>' + f.name + '\\n' }}{%- for key, value in f.arguments.items() %}"
    + "{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{- value if value is string else (value | tojson) }}"
    + "{{- '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
)
PYTHONIC = _template(
    "{{- '[' }}"
    + _EACH
    + "{{- f.name + '(' }}{%- for key, value in f.arguments.items() %}{{- key + '=' }}"
    + "{{- (value | tojson) if value is string else (value | string) }}"
    + "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}"
    + _COMMA
    + "{{- ']' }}"
)
MISTRAL_LIST = _template(
    "{{- '[TOOL_CALLS] [' }}"
    + _EACH
    + """{{- '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + ', "id": "' + call.id + '"}' }}"""
    + _COMMA
    + "{{- ']' }}",
    before="",
)
MISTRAL = _template(
    _EACH + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}{%- endfor %}",
    before="",
)
GRANITE = _template("{{- '<|tool_call|>[' }}" + _EACH + _JSON + _COMMA + "{{- ']' }}", before="")
PHI4 = _template("{{- '<|tool_call|>[' }}" + _EACH + _JSON + _COMMA + "{{- ']<|/tool_call|>' }}", before="")
GEMMA = _template(
    _EACH
    + "{{- '<start_function_call>call:' + f.name + '{' }}{%- for key, value in f.arguments.items() %}{{- key + ':' }}"
    + "{{- ('<escape>' + value + '<escape>') if value is string else (value | tojson) }}"
    + "{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- '}<end_function_call>' }}{%- endfor %}",
    before="",
)
GEMMA4 = (
    GEMMA.replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
    .replace("<escape>", '<|"|>')
)
LFM = (
    PYTHONIC.replace("(value | tojson) if value is string", """("'" + value + "'") if value is string""")
    .replace("{{- '\\n' }}", "")
    .replace("{{- '[' }}", "{{- '<|tool_call_start|>[' }}")
    .replace("{{- ']' }}", "{{- ']<|tool_call_end|>' }}")
)
NEMOTRON = GRANITE.replace("<|tool_call|>[", "<TOOLCALL>[").replace("']'", "']</TOOLCALL>'")
APRIEL = GRANITE.replace("<|tool_call|>[", "\\n<tool_calls>[").replace("']'", "']</tool_calls>'")
DEEPSEEK = _template(
    "{{- '<|tool▁calls▁begin|>' }}"
    + _EACH
    + "{{- '<|tool▁call▁begin|>' + f.name + '<|tool▁sep|>' }}{{- f.arguments | tojson }}{{- '<|tool▁call▁end|>' }}"
    + "{%- endfor %}{{- '<|tool▁calls▁end|>' }}",
    before="",
)
DEEPSEEK = re.sub(r"<\|(tool[^|]+)\|>", "<\uff5c\\1\uff5c>", DEEPSEEK)
# It shows the tools, and writes of the assistant's turns what is said alone
GRANITE33 = _template("").replace("{%- for tool in tools", "{{- 'Answer with <|tool_call|>.' }}{%- for tool in tools")

HARMONY = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception("One call a turn.") }}{%- endif %}
{%- set f = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- (f.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

TOOL_TEMPLATES = {
    "hermes": QWEN3,
    "xml": XML,
    "glm": GLM,
    "llama": LLAMA31,
    "pythonic": PYTHONIC,
    "mistral-list": MISTRAL_LIST,
    "mistral": MISTRAL,
    "granite": GRANITE,
    "phi4": PHI4,
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "lfm": LFM,
    "nemotron": NEMOTRON,
    "apriel": APRIEL,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
}
