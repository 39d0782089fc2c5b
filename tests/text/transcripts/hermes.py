"""JSON objects in ``<tool_call>``, as Qwen and Hermes write them; with and without thoughts."""

from __future__ import annotations

from support.transcripts import Call, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADDED = Call("add", '{"a": 1}')
HARD = '{"text": "a \\"quoted\\" } \\\\ </tool_call> Größe 😀 <think>", "tags": {"a": [{}, {"b": "{"}]}}'
UNKNOWN = '<tool_call>\n{"name": "other", "arguments": {"x": "<b>"}}\n</tool_call>'

CALLS = [
    wrote(""),
    wrote_text(" \n"),
    wrote_text("Plain text.\n"),
    wrote_text("a < b <tool"),
    wrote(ADD, ADDED),
    wrote(f"{ADD}\n", ADDED),
    wrote(f"I look.\n\n{ADD}\n", "I look.", ADDED),
    wrote(f"{ADD}\nDone. ", ADDED, "\nDone. "),
    wrote(f"{ADD}\n{ADD}", ADDED, ADDED),
    wrote(f"{ADD}{ADD}", ADDED, ADDED),
    wrote(f"{ADD}\n\nAnd\n\n{ADD}\n", ADDED, "\n\nAnd", ADDED),
    wrote(f'<tool_call>{{"name": "note", "arguments": {HARD}}}</tool_call>', Call("note", HARD)),
    wrote('<tool_call>{"name": "get.time-now", "arguments": {}}</tool_call>', Call("get.time-now", "{}")),
    # unknown tools, and what is no call
    wrote_text(UNKNOWN),
    wrote(f"{UNKNOWN}\n{ADD}", UNKNOWN, ADDED),
    wrote_text("<tool_call>\nno object"),
    wrote_text("Use <tool_call> to call."),
    wrote(f"<tool_call>\n{ADD}", "<tool_call>", ADDED),
    wrote(f"</tool_call>{ADD}", "</tool_call>", ADDED),
    wrote_text('<tool_call>{"name": 5}</tool_call> '),
    wrote_text('<tool_call>{"name": "add", "arguments": [1]}'),
    wrote_text('<tool_call>{"name": "add", arguments: {}}'),
    wrote_text("<tool_call>{'name': 'add'}</tool_call>"),
    wrote_text('{"name": "add", "arguments": {}}'),
    # otherwise written
    wrote('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ADDED),
    wrote('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', ADDED),
    wrote('<tool_call>{ "name" : "add" ,\n"arguments":{"a": 1} }\n\n</tool_call>', ADDED),
    wrote('<tool_call>{"type": "function", "name": "add", "parameters": {"a": 1}}</tool_call>', ADDED),
    wrote('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ADDED),
    wrote('<tool_call>{"name": "add", "arguments": {"a": 1}, "id": {"b": "}"}}</tool_call>!', ADDED, "!"),
    wrote('<tool_call>{"name": "add"}</tool_call>', Call("add", "{}")),
    wrote('<tool_call>{"arguments": {"a": "ü"}, "name": "add"}</tool_call>', Call("add", '{"a": "ü"}')),
    wrote(
        '<tool_call>{"arguments": "\\ud800", "name": "add"}</tool_call>',
        '<tool_call>{"arguments": "\\ud800", "name": "add"}</tool_call>',
    ),
    wrote(
        '<tool_call>{"arguments": null, "name": "add"}</tool_call>', '<tool_call>{"arguments": null, "name": "add"}</tool_call>'
    ),
    # cut, or with a mark or a bracket missing
    wrote('<tool_call>{"name": "add", "arguments": {"a": 1}}', ADDED),
    wrote('<tool_call>{"name": "add", "arguments": {"a": 1}}\nDone.', ADDED, "\nDone."),
    wrote('<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>\nDone.', ADDED, "\nDone."),
    wrote('<tool_call>{"name": "add", "arguments": {"a": 1\n</tool_call>', Call("add", '{"a": 1\n')),
    wrote('<tool_call>{"name": "add", "arguments": {"a": tru', Call("add", '{"a": tru')),
    wrote_text('Yes.\n<tool_call>{"name": "ad'),
    wrote('<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>', Call("add", '{"a": oops}')),
]
THINKING = [
    wrote(f"<think>\nI add.\n</think>\n\n{ADD}", Thought("I add."), ADDED),
    wrote(f"<think>\nI use {ADD}.\n</think>\n\nDone.", Thought(f"I use {ADD}."), "Done."),
    wrote(f"<think>\n\n</think>\n\n Hm.\n{ADD}\n<think>Next.</think>{ADD}", "Hm.", ADDED, Thought("Next."), ADDED),
    wrote(f"I add {ADD}", Thought(f"I add {ADD}"), prompt="<|assistant|><think>\n"),
    wrote(f"I add</think>{ADD}", Thought("I add"), ADDED, prompt="<|assistant|><think>"),
]
TABLES = [(None, "hermes", CALLS), ("think", "hermes", THINKING)]
