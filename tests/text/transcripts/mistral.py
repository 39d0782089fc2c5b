"""Calls after ``[TOOL_CALLS]``: each with its mark, or in a list."""

from __future__ import annotations

from support.transcripts import Call, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

ADD = '[TOOL_CALLS]add[ARGS]{"a": 1}'
ADDED = Call("add", '{"a": 1}')
HARD = '{"text": "a \\"quoted\\" } \\\\ [TOOL_CALLS]add[ARGS]{} Größe 😀", "tags": {"a": [{}, {"b": "["}]}}'
OBJECT = '{"name": "add", "arguments": {"a": 1}, "id": "a1b2c3d4e"}'
OTHER = '{"name": "other", "arguments": {"a": "]"}}'

CALLS = [
    wrote(""),
    wrote_text("Plain [text]."),
    wrote(ADD, ADDED),
    wrote(f"{ADD}{ADD}", ADDED, ADDED),
    wrote(f"I look.\n{ADD}", "I look.", ADDED),
    wrote(f"{ADD} Done.", ADDED, " Done."),
    wrote('[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', ADDED),
    wrote('[TOOL_CALLS] add {"a": 1}', ADDED),
    wrote(f"[TOOL_CALLS]note[ARGS]{HARD}", Call("note", HARD)),
    wrote("[TOOL_CALLS]get.time-now[ARGS]{}", Call("get.time-now", "{}")),
    wrote('[TOOL_CALLS]add[ARGS]{"a": oops}', Call("add", '{"a": oops}')),
    wrote('[TOOL_CALLS]add[ARGS]{"a": "}', Call("add", '{"a": "}')),
    wrote_text('[TOOL_CALLS]other[ARGS]{"a": 1}'),
    wrote(f'[TOOL_CALLS]other[ARGS]{{"a": 1}}{ADD}', '[TOOL_CALLS]other[ARGS]{"a": 1}', ADDED),
    wrote_text("[TOOL_CALLS]add[ARGS]"),
    wrote_text("[TOOL_CALLS]add[ARGS]a=1"),
    wrote_text("Write [TOOL_CALLS] and [ARGS]."),
    wrote_text("[TOOL_CAL"),
    # lists
    wrote(f"[TOOL_CALLS] [{OBJECT}]", ADDED),
    wrote(f"[TOOL_CALLS][{OBJECT}, {OBJECT}]", ADDED, ADDED),
    wrote(f"Yes: [TOOL_CALLS] [ {OBJECT} ,\n{OBJECT} ]\n", "Yes:", ADDED, ADDED),
    wrote(f"[TOOL_CALLS]{OBJECT}", ADDED),
    wrote(f"[TOOL_CALLS][{OBJECT}", ADDED),
    wrote(f"[TOOL_CALLS][{OBJECT}, {OTHER}, {OBJECT}] Done.", ADDED, f", {OTHER}", ADDED, " Done."),
    wrote(f'[TOOL_CALLS][{OBJECT}, {{"name": "ad', ADDED, ', {"name": "ad'),
    wrote(f"[TOOL_CALLS][{OBJECT}, {OBJECT[:30]}", ADDED, Call("add", "{")),
    wrote('[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add"}]', ADDED),
    wrote('[TOOL_CALLS] [{"id": "a1", "name": "add", "arguments": {"a": 1}}]', ADDED),
    wrote_text(f"[TOOL_CALLS][{OTHER}]"),
    wrote_text("[TOOL_CALLS] []"),
    wrote_text('[TOOL_CALLS] ["add"]'),
    wrote_text(f"[{OBJECT}]"),
]
THINKING = [
    wrote(f"[THINK]I add.[/THINK]{ADD}", Thought("I add."), ADDED),
    wrote(f"[THINK]I use {ADD}.[/THINK]Done.", Thought(f"I use {ADD}."), "Done."),
]
TABLES = [(None, "mistral", CALLS), ("mistral", "mistral", THINKING)]
