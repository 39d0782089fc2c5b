"""JSON objects as the whole answer: Llama 3, and calls that are forced on models that know no form."""

from __future__ import annotations

from support.transcripts import Call, wrote, wrote_text

ADD = '{"name": "add", "parameters": {"a": 1}}'
ADDED = Call("add", '{"a": 1}')

BOTH = [
    wrote(""),
    wrote_text(" "),
    wrote(ADD, ADDED),
    wrote(f"\n{ADD}\n", ADDED),
    wrote(f"{ADD}; {ADD}", ADDED, ADDED),
    wrote(f"{ADD}\n{ADD};\n", ADDED, ADDED),
    wrote(f"{ADD} So.", ADDED, " So."),
    wrote(f"{ADD}; so.", ADDED, "; so."),
    wrote_text(f"Use {ADD}"),
    wrote('{"arguments": {"a": 1}, "name": "add"}', ADDED),
    wrote_text('{"name": "other", "parameters": {}}'),
    wrote_text('{"city": "Paris"}'),
    wrote_text('{"city": "Paris"}\n' + ADD),
    wrote_text("{not JSON} at all"),
    wrote_text("{" * 50),
    wrote('{"name": "add", "parameters": {"a": "}', Call("add", '{"a": "}')),
    wrote('{"name": "add", "parameters": {"a": 1}', ADDED),
]
LLAMA3 = [
    wrote(f"<|python_tag|>{ADD}", ADDED),
    wrote(f"I look.\n<|python_tag|> {ADD}", "I look.", ADDED),
    wrote_text("<|python_tag|>print(1)"),
    wrote('<function=add>{"a": 1}</function>', ADDED),
    wrote('Yes: <function=add>{"a": 1}</function> <function=note>{"text": "</function>"}\n</function>\n',
          "Yes:", ADDED, Call("note", '{"text": "</function>"}')),
    wrote_text('<function=other>{"a": 1}</function>'),
    wrote_text("<function=add>a=1</function>"),
    wrote('<function=add>{"a": 1', Call("add", '{"a": 1')),
    wrote('<function=add>{"a": 1}\nDone.', ADDED, "\nDone."),
    wrote_text("<function=ad"),
]  # fmt: skip
TABLES = [(None, "llama3", BOTH + LLAMA3), (None, "plain", BOTH)]
