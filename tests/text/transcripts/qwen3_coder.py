"""``<function=name>`` and ``<parameter=key>`` with values on lines of their own, as Qwen3-Coder writes them; with thoughts."""

from __future__ import annotations

from support.tagged import fully
from support.transcripts import Call, wrote, wrote_text

from pipedec.text.parsers.reader import Thought
from pipedec.text.parsers.tagged_forms import QWEN3_CODER

ADD = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ADDED = Call("add", '{"a": 1}')
NOTE = "<tool_call>\n<function=note>\n<parameter=text>\n"
END = "\n</parameter>\n</function>\n</tool_call>"

CALLS = [
    wrote(ADD, ADDED),
    wrote("<tool_call>\n<function=get.time-now>\n</function>\n</tool_call>", Call("get.time-now", "{}")),
    wrote("<function=get.time-now></function>", Call("get.time-now", "{}")),
    wrote("<function=get.time-now></tool_call>", Call("get.time-now", "{}")),
    wrote(f"{NOTE}\n  a\n\n{END}", Call("note", '{"text": "\\n  a\\n\\n"}')),
    wrote(f"{NOTE}a\n</function>\nb\n<parameter=x>c<parameter=tags>{END}",
          Call("note", '{"text": "a\\n</function>\\nb\\n<parameter=x>c<parameter=tags>"}')),
    # tags that are missing
    wrote(f"<function=add>\n<parameter=a>\n1\n<parameter=b>\n2{END}", Call("add", '{"a": 1, "b": 2}')),
    wrote(f"{NOTE}b\n<parameter=tags>\n{{}}{END}", Call("note", '{"text": "b", "tags": {}}')),
    wrote(f"{NOTE}b\n<parameter=text>\nc{END}", Call("note", '{"text": "b\\n<parameter=text>\\nc"}')),
    wrote(f"{NOTE}b\n</function>\n</tool_call>\nDone.", Call("note", '{"text": "b"}'), "\nDone."),
    wrote(f"{NOTE}b\n</function>\n{ADD}", Call("note", '{"text": "b"}'), ADDED),
    wrote("<function=add><parameter=a>1</parameter></tool_call>", ADDED),
    wrote("<function=add><parameter=a>1</parameter>\nDone.", ADDED, "\nDone."),
    # what is no call
    wrote_text('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
    wrote_text("<function=add>a</function>"),
    wrote_text("<function=add>\n"),
    wrote_text("<function=add"),
]  # fmt: skip
THINKING = [
    wrote(f"<think>\nI use {ADD}.\n</think>\n\n{ADD}", Thought(f"I use {ADD}."), ADDED),
    wrote(f"I add.\n</think>\n\n{ADD}\n", Thought("I add."), ADDED, prompt="<|im_start|>assistant\n<think>\n"),
]
TABLES = [(None, "qwen3_coder", fully(QWEN3_CODER) + CALLS), ("think", "qwen3_coder", THINKING)]
