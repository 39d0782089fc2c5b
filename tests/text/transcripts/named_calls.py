"""A name and a JSON object between marks: DeepSeek and Kimi K2."""

from __future__ import annotations

from support.transcripts import Call, Transcript, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

ONE, OOPS = '{"a": 1}', '{"a": oops}'
ADDED = Call("add", ONE)
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
K2 = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


def _transcripts(section: tuple[str, str], call: str) -> list[Transcript]:
    begin, end = section
    add, other = call.format("add", ONE), call.format("other", ONE)
    hard = f'{{"text": "\\"quoted\\" }} ``` {add[:30]}{end} ü😀", "tags": {{"a": [{{}}]}}}}'.replace("\n", " ")
    open_add = add[: add.index("}") + 1]
    return [
        wrote(""),
        wrote_text("Plain text."),
        wrote(f"{begin}{add}{end}", ADDED),
        wrote(f"{begin}{add}{add}{end}", ADDED, ADDED),
        wrote(f"{begin}\n{add}\n{add}\n{end}\n", ADDED, ADDED),
        wrote(f"I look.\n{begin}{add}{end}Done.", "I look.", ADDED, "Done."),
        wrote(f"{begin}{call.format('note', hard)}{end}", Call("note", hard)),
        wrote(f"{begin}{call.format('get.time-now', '{}')}{end}", Call("get.time-now", "{}")),
        # a mark that is missing, a tool that is unknown, a mark in prose
        wrote(add, ADDED),
        wrote(f"{begin}{add}", ADDED),
        wrote(f"{begin}{open_add}", ADDED),
        wrote(f"{begin}{open_add}{end} Done.", ADDED, " Done."),
        wrote(f"{begin}{open_add[:-1]}", Call("add", '{"a": 1')),
        wrote(f"{begin}{call.format('add', OOPS)}{end}", Call("add", OOPS)),
        wrote_text(f"{begin}{other}{end}"),
        wrote(f"{begin}{other}{add}{end}", f"{begin}{other}", ADDED),
        wrote(f"{begin}{add}{other}{end}", ADDED, f"{other}{end}"),
        wrote_text(f"{begin}{call.format('add', 'no object')}{end}"),
        wrote_text(f"Write {begin} and {end}."),
        wrote_text(f"{begin}{add[:20]}"),
    ]


V3_ALSO = [
    wrote('<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json{"a": 1}```<｜tool▁call▁end｜>', ADDED),
    wrote_text('```json\n{"a": 1}\n```'),
]
K2_ALSO = [
    wrote('<|tool_call_begin|>add:12<|tool_call_argument_begin|> {"a": 1} <|tool_call_end|>', ADDED),
    wrote_text('<|tool_call_begin|>functions.add<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'),
]
THINKING = [
    wrote(f"Hm.</think>\n\n{DEEPSEEK[0]}{V31.format('add', ONE)}{DEEPSEEK[1]}", Thought("Hm."), ADDED, prompt="<think>"),
]
TABLES = [
    (None, "deepseek_v3", _transcripts(DEEPSEEK, V3) + V3_ALSO),
    (None, "deepseek_v31", _transcripts(DEEPSEEK, V31)),
    ("think", "deepseek_v31", THINKING),
    (None, "kimi_k2", _transcripts(KIMI, K2) + K2_ALSO),
]
