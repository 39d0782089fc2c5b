"""``<arg_key>`` and ``<arg_value>``, as GLM writes them, from 4.7 on without newlines; with thoughts."""

from __future__ import annotations

from support.tagged import briefly, fully
from support.transcripts import Call, wrote, wrote_text

from pipedec.text.parsers.reader import Thought
from pipedec.text.parsers.tagged_forms import GLM45, GLM47

ADD = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
ADDED = Call("add", '{"a": 1}')
CALLS = [
    wrote(ADD, ADDED),
    wrote(f"{ADD}{ADD}", ADDED, ADDED),
    wrote("<tool_call>\nadd<arg_key>a</arg_key> <arg_value> 1\n</arg_value></tool_call>", ADDED),
    wrote("<tool_call>get.time-now</tool_call>", Call("get.time-now", "{}")),
    wrote("<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>a\n<arg_key>tags</arg_key>\n<arg_value>{}</arg_value>",
          Call("note", '{"text": "a", "tags": {}')),
    wrote_text("<tool_call>add</arg_key>"),
    wrote_text("<tool_call>add "),
]  # fmt: skip
THINKING = [
    wrote(f"\n<think>I add.</think>\n{ADD}", Thought("I add."), ADDED),
    wrote(f"I add.</think>{ADD}", Thought("I add."), ADDED, prompt="<|assistant|><think>"),
]
TABLES = [(None, "glm45", fully(GLM45) + CALLS), (None, "glm47", briefly(GLM47)), ("think", "glm45", THINKING)]
