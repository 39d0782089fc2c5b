"""Chat templates that know tools, with what matters of those that models come with."""

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
