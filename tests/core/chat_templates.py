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
    "{% for m in messages %}"
    "{{ loop.index }}/{{ loop.revindex }}/{{ loop.revindex0 }}/{{ loop.cycle('a','b') }}/{{ loop.depth }}"
    "{{ loop.previtem.role if loop.previtem }}/"
    "{{ loop.nextitem.role if loop.nextitem }}/{{ loop.changed(m.role) }}"
    "{% endfor %}",
    "{% for m in messages recursive %}{{ loop.depth0 }}{{ m if m is string }}"
    "{{ loop(m.values()) if m is mapping and loop.depth < 2 }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}"
    "{% else %}none{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ loop.length }}{{ m.content }}{% endfor %}",
    "{%- set ns = namespace(x=0, s='') -%}{% for m in messages %}{% set ns.x = ns.x + m.content|length %}"
    "{% set ns.s = ns.s ~ m.role[0] %}{% endfor %}{{ ns.x }}{{ ns.s }}",
    "{% macro a(x) %}{{ b(x) }}{% endmacro %}{% macro b(y) %}<{{ y }}>{% endmacro %}{{ a('q') }}{{ a.name }}"
    "{{ a.arguments }}",
    "{% set f %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ f | length }}{{ f | upper }}",
    "{{ messages | tojson }}",
    "{{ messages[0] | tojson(indent=4, ensure_ascii=True) }}",
    "{{ messages | tojson(indent=2, separators=(',',': '), sort_keys=True) }}",
    "{{ {'b':1,'a':[1,2,{'c':none}]} | tojson(2) }}",
    "{{ {'a':'<é&>'} | tojson(ensure_ascii=false) }}{{ {'b':1,'a':2} | tojson(sort_keys=true) }}",
    "{{ 1.0 | tojson }}{{ 1e30 | tojson }}{{ true | tojson }}{{ none | tojson }}{{ (1,2) | tojson }}{{ 'x' | tojson }}",
    "{{ messages | map(attribute='content') | map('trim') | map('upper') | list }}",
    "{{ messages | groupby('role') | map(attribute='grouper') | list }}"
    "{{ messages | groupby('role') | map('first') | list }}",
    "{{ messages | map(attribute='role') | unique | sort(reverse=true) | join('|') }}",
    "{{ messages | selectattr('content', 'string') | list | count }}"
    "{{ messages | rejectattr('name','defined') | list | length }}",
    "{{ messages | sum(attribute='content', start='') if false }}{{ [1,2,3] | sum }}{{ [3,1]|max }}{{ [3,1]|min }}",
    "{{ [[1,2],[3]] | sum(start=[]) }}{{ 'abc' | list }}{{ 'abc' | reverse }}{{ [1,2]|reverse|list }}",
    "{{ 'a b c'.split() }}{{ 'a,b'.rsplit(',',1) }}{{ 'x=1'.partition('=') }}{{ 'aXb'.lower().title().swapcase() }}",
    "{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ messages[-1].content }}{{ messages[:1] | length }}{{ messages[::2] | length }}",
    "{{ messages[0]['content'] is defined }}{{ messages[0].zz is undefined }}{{ zz is none }}{{ none is none }}"
    "{{ 3 is number }}{{ 3 is integer }}{{ 3.0 is float }}{{ true is boolean }}{{ 3 is odd }}"
    "{{ 4 is divisibleby 2 }}{{ 'a' is in 'abc' }}{{ messages is sequence }}{{ 'x' is sameas 'x' }}"
    "{{ 'A' is upper }}{{ f is callable }}",
    r"{{ 'hello world' | wordcount }}{{ 'hello world' | capitalize }}{{ 'a\tb' | replace('\t',' ') }}"
    "{{ 'hello' | truncate(3, true, '') }}",
    "{{ 'a long line of words to wrap' | wordwrap(10) }}{{ 'x' | center(5) }}{{ '%s-%s' | format('a','b') }}"
    "{{ 'a b' | urlencode }}",
    "{{ '<b>x</b>' | striptags }}{{ '<b>' | escape }}{{ '<b>' | safe }}{{ '<b>' | forceescape }}"
    "{{ {'a':1} | xmlattr }}",
    "{{ 3.7 | int }}{{ '3.7' | float }}{{ '0x1f' | int(base=16) }}{{ -3 | abs }}{{ 3.14159 | round(2) }}"
    "{{ 2.5 | round }}{{ 3.2 | round(0,'ceil') }}{{ 1000000 | filesizeformat }}",
    "{{ {'a':1,'b':2}.items() | list }}{{ {'a':1}.get('b', 5) }}{{ {'a':1} | items | list }}"
    "{{ {'b':2,'a':1} | dictsort(reverse=true) }}{{ {'b':2,'a':1} | dictsort(false,'value') }}",
    "{{ [1,2,3,4] | batch(3) | list }}{{ [1,2,3,4] | slice(3) | list }}{{ [1,2] | random in [1,2] }}"
    "{{ [1,2,3] | last }}{{ [] | first is undefined }}",
    "{{ 'a' if messages else 'b' }}{{ messages and 'c' }}{{ not messages }}{{ 1 < 2 <= 2 }}{{ 'a' != 'b' }}"
    "{{ 'x' in messages[0] }}{{ 'role' in messages[0] }}",
    "{% raw %}{{ not }} {% this %}{% endraw %}{# c #}{%- if true -%} x {%- endif -%}",
    "{% filter upper | trim %} abc {{ messages[0].role }} {% endfilter %}",
    "{% with a=1, b=a|default(5) %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "{% macro d(items) %}{% for i in items %}{{ caller(i) }}{% endfor %}{% endmacro %}"
    "{% call(i) d([1,2]) %}[{{ i }}]{% endcall %}",
    "{% set a, b = messages[0].items() | first %}{{ a }}:{{ b }}",
    "{% set x = messages | map(attribute='role') | list %}{{ x | join(', ') }}{{ x.index('user') }}"
    "{{ x.count('user') }}",
    "{{ strftime_now('%d %B %Y %H:%M:%S') }}{{ strftime_now is defined }}",
    "{{ raise_exception('no') if false }}{{ raise_exception is defined }}",
    "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ bos_token }}{{ eos_token }}"
    "{{ pad_token is defined }}{{ unk_token is defined }}",
    "{{ range(3) | list }}{{ range(1, 10, 4) | list }}{{ dict(a=1) }}{{ joiner(', ')() }}"
    "{% set j = joiner('|') %}{{ j() }}a{{ j() }}b{% set c = cycler('x','y') %}{{ c.next() }}{{ c.next() }}"
    "{{ c.current }}{{ c.reset() }}",
    "{% autoescape true %}{{ '<a>' }}{% endautoescape %}",
    """{{ "a" "b" }}{{ 'x' ~ 1 ~ 2.0 ~ none ~ true }}{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 3 }}{{ [1] + [2] }}"""
    "{{ (1,) + (2,) }}{{ 'ab' * 2 }}{{ -1 }}{{ +1 }}",
    "{{ messages[0].content.strip().startswith('a') }}{{ 'a-b'.replace('-', '_', 1) }}{{ 'abc'.find('c') }}"
    "{{ 'a1'.isalnum() }}{{ '5'.isdigit() }}{{ 'x'.zfill(3) }}{{ 'x'.ljust(3) }}|{{ 'ab'.removeprefix('a') }}"
    r"{{ 'é'.casefold() }}{{ 'a\nb'.splitlines() }}{{ 'abc'.endswith(('c','d')) }}{{ 'a{}b{x}'.format(1, x=2) }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{%- generation -%} y {%- endgeneration -%}",
    "{% if messages[0] is mapping %}{% elif true %}{% else %}{% endif %}{% for k, v in messages[0] | dictsort %}"
    "{{ k }}{{ v }}{% endfor %}",
    "{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{{ messages | pprint }}{{ messages | string | length }}{{ messages | length }}",
    "{{ 'x' | attr('upper') is defined }}{{ messages[0] | attr('items') is defined }}"
    "{{ messages[0].items is defined }}{{ messages[0]['items'] is defined }}",
    "{{ namespace(a=1).a }}{% set n = namespace({'b':2}) %}{{ n.b }}{{ n['b'] if false }}",
    "{% set content = messages[0].content %}{% if '</think>' in content %}"
    r"{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ content }}",
    "{% set m = messages | last %}{{ m.content | default('none', true) }}{{ '' | default('d', true) }}"
    "{{ none | d('e') }}",
    "{{ ['a','b'] | map('upper') | join }}{{ ['a',none] | select | list }}{{ [0,1] | reject | list }}"
    "{{ [1,2,3] | select('>', 1) | list if false }}{{ [1,2,3] | select('gt', 1) | list }}",
    "{{ messages[1].content if messages|length > 1 else 'x' }}{{ (messages | first).role }}"
    "{{ messages|map('attr','role')|list|length }}",
    "{{ messages[99] is defined }}{{ 1 / 3 }}{{ 10 | string }}{{ 1_000 }}{{ 0x10 }}{{ 1e3 }}"
    "{% block b %}x{{ bos_token }}{% endblock %}",
]
