"""Chat templates in the manner of the models', written for these tests, and the constructs they are made of."""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] | default('') %}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""

LLAMA31 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You may call these functions, as JSON.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One tool call at a time, please.") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call functions.\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and \
not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
                {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' }}
            {{- reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "llama31": LLAMA31, "qwen3": QWEN3}

SNIPPETS = [
    "{% for m in messages %}{{ loop.last or messages[loop.index0 + 1].role }}{% endfor %}",
    "{% for m in messages %}\n  {% if loop.first %}\n a\n  {% endif %}\n{{ m.role }}\n{% endfor %}\n",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% continue %}{% endfor %}x",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{{ m.role }}{% else %}0{% endfor %}",
    "{% for m in messages recursive %}{{ m.role if m.role else loop([]) }}{% endfor %}",
    "{% for a, b in messages[0].items() %}{{ a }}={{ b }};{% endfor %}{% set x, y = 1, (2, 3) %}{{ x }}{{ y }}",
    "{% macro f(x,y=2) %}<{{ x }}{{ y }}{% if caller %}{{ caller() }}{% endif %}>{% endmacro %}{{ f(1) }}{{ f(1,3) }}",
    "{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(v) f('k') %}v={{ v }}{% endcall %}",
    "{% set x %}a{{ 1 }}\n{% endset %}{{ x }}{% filter upper %}abc{{ x }}{% endfilter %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}",
    "{{ messages | map(attribute='role') | list }}{{ messages | rejectattr('role', 'in', ['user']) | list | length }}",
    "{{ messages[0] | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{{ [1, 2.5, none, true, 'é', {'a': [bos_token]}] }}{{ {'a': messages[0].role, 'b': (1, eos_token)} }}",
    "{{ 'a' ~ 1 ~ none ~ missing ~ [1, bos_token] }}{{ 'x' * 3 + 'y' }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ -7 % 3 }}{{ 7/2 }}",
    "{{ '%s is %05.1f' % ('x', 2) }}{{ '%d%%' | format(3) }}{{ '**{0}** 12345 {1:>5}'.format('a', 1) }}",
    "{{ '{a}'.format_map({'a': 'b'}) }}{{ 'a,b'.split(',') | join('-') }}{{ '-'.join(['a', 'b']) }}",
    "{{ 'abcabc'.replace('b', 'XY') }}{{ 'abc' | replace('b', '') }}{{ 'a b' | title | trim | center(9) }}|",
    "{{ 'l1\nl2' | indent(4) }}{{ 'l1\nl2' | indent(2, true) }}{{ 'long words here' | truncate(8) }}",
    "{{ missing | default(100000) }}{{ 5.678 | round(1) }}{{ '12' | int + 1 }}{{ [3, 1, 2] | sort | first }}",
    "{% set ns = namespace(n=100000, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "{{ dict(a=1, b=2) | dictsort }}{{ dict.fromkeys(['x'], 0) }}{{ range(3) | list }}{{ range(5,1,-2) | list }}",
    "{{ strftime_now('%Y-%m-%d %H:%M') }}{{ '<&>' | e }}{{ '<&>' }}{{ 'a\\nb' }}",
    "{% if messages is iterable and messages is not mapping and messages[0].content is string %}ok{% endif %}",
    "{% generation %}{% set inner = 1 %}{{ messages[0].content }}{% endgeneration %}{{ inner is defined }}{# note #}",
    "{{ messages | batch(2, 'fill') | list | length }}{{ 'b' in 'abc' }}{{ 'ä' | upper }}{{ tools }}",
    "a {%- if true -%} b {%- endif +%} \n c {#- x -#} d",
]
