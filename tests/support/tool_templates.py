"""Chat templates that know tools, with what matters of those that models come with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pipedec.text.tokenizer import Tokenizer

HERMES_TEMPLATE = """{%- if tools %}<|system|># Tools

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}
</tool_call>
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|user|><tool_response>{{ message.content }}</tool_response>
{%- else %}<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

LLAMA3_TEMPLATE = """{%- for message in messages %}
{%- if message.role == "tool" %}<|ipython|>{{ message.content | tojson }}
{%- elif "tool_calls" in message %}
{%- set call = message.tool_calls[0].function %}<|assistant|>{{ '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}}
{%- else %}<|{{ message.role }}|>{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if tools %}<|user|>Given the following functions, please respond with a JSON for a function call.
{{ 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- for tool in tools %}
{{ tool | tojson(indent=4) }}
{%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

MISTRAL_TEMPLATE = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls | tojson }}{% else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""

# It shows tools, but no form of calls that is known.
OTHER_TEMPLATE = MISTRAL_TEMPLATE.replace("[TOOL_CALLS]", "[CALL]")

THINKING_TEMPLATE = HERMES_TEMPLATE.replace(
    "|>{{ message.content or",
    "|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or",
).replace(
    "<|assistant|>{% endif %}",
    "{% if reasoning_effort %}<|{{ reasoning_effort }}|>{% endif %}<|assistant|>"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)


DOCUMENTS_TEMPLATE = (
    "{% for document in documents or [] %}<{{ document.text }}>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
)

ITEMS_TEMPLATE = HERMES_TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for key, value in call.function.arguments | items %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}",
)

# Calls with tagged parameters.
QWEN3_CODER_TEMPLATE = r"""{%- if tools %}
{{- "If you choose to call a function ONLY reply in the following format:\n\n<tool_call>\n<function=example_function_name>\n" }}
{{- "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>" }}
{%- endif %}
{%- for message in messages %}
{%- for tool_call in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
{%- for args_name, args_value in tool_call.arguments|items %}
{{- '<parameter=' + args_name + '>\n' }}{{- args_value }}{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{%- endfor %}"""

SEED_OSS_TEMPLATE = r"""{%- set toolcall_begin_token = '<seed:tool_call>' -%}
{%- set think_begin_token = '<seed:think>' -%}
{%- if tools is iterable and tools | length > 0 %}
{{"<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>value_1</parameter>\n</function>"}}
{%- endif %}
{{ "\n" + toolcall_begin_token + "\n<function=" + tool_call.name + ">\n" }}"""

GLM45_TEMPLATE = r"""{%- if tools -%}
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
...
</tool_call>{%- endif -%}
{{ '\n<think></think>' }}
{{ '\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>"""

GLM47_TEMPLATE = r"""{%- if tools -%}
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>...</tool_call>{%- endif -%}
{{- '<think></think>' }}
{{- '<tool_call>' + tc.name -}}
{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"""

MINIMAX_M2_TEMPLATE = r"""{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- if tools -%}
{{- '\n' ~ toolcall_begin_token }}
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
...
</invoke>
{%- endif -%}
{{- ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}"""

DEEPSEEK_V32_TEMPLATE = r"""{%- set dsml_token = "｜DSML｜" -%}
{%- set thinking_start_token = "<think>" -%}
{%- if tools -%}
You can invoke functions by writing a "<{{ dsml_token }}function_calls>" block like the following as part of your reply:
<{{ dsml_token }}function_calls>
<{{ dsml_token }}invoke name="$FUNCTION_NAME">
<{{ dsml_token }}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{ dsml_token }}parameter>
{%- endif -%}
{%- for tool_call in message.tool_calls -%}{%- endfor -%}"""
DEEPSEEK_V4_TEMPLATE = DEEPSEEK_V32_TEMPLATE.replace("function_calls>", "tool_calls>")

STEP3_TEMPLATE = r"""{%- if tools %}
{{- '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="' + tool_call.name + '">\n' }}
{%- endif %}
{%- if add_generation_prompt %}<|BOT|>assistant\n<think>\n{%- endif %}"""


def with_template(tokenizer_files: Path, folder: Path, template: str, *special: str) -> Tokenizer:
    """A copy of a tokenizer in the new ``folder``, with another chat template and further special tokens."""
    shutil.copytree(tokenizer_files, folder, ignore=shutil.ignore_patterns("*.jinja"))
    configuration = folder / "tokenizer_config.json"
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | {"extra_special_tokens": special}))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)
