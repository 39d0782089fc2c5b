"""Lists of JSON objects after a mark: Phi-4-mini, Granite and Command."""

from __future__ import annotations

from support.transcripts import Call, Transcript, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

ADD = '{"name": "add", "arguments": {"a": 1}}'
ADDED = Call("add", '{"a": 1}')
COHERE = '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}'
OTHER = '{"name": "other", "arguments": {}}'


def _transcripts(begin: str, end: str, add: str) -> list[Transcript]:
    return [
        wrote(""),
        wrote_text("Plain [text]."),
        wrote(f"{begin}[{add}]{end}", ADDED),
        wrote(f"{begin} [\n    {add},\n    {add}\n]\n{end}", ADDED, ADDED),
        wrote(f"I look.\n{begin}[{add}]{end} Done.", "I look.", ADDED, " Done."),
        wrote(f"{begin}{add}{end}", ADDED),
        wrote(f"{begin}[{add}", ADDED),
        wrote(f"{begin}[{add}]", ADDED),
        wrote(
            f'{begin}[{{"name": "note", "arguments": {{"text": "{begin}]}}ü"}}}}]{end}',
            Call("note", f'{{"text": "{begin}]}}ü"}}'),
        ),
        wrote(f'{begin}[{{"name": "get.time-now", "arguments": {{}}}}]{end}', Call("get.time-now", "{}")),
        wrote(f"{begin}[{add}, {OTHER}]{end}", ADDED, f", {OTHER}"),
        wrote_text(f"{begin}[{OTHER}]{end}"),
        wrote_text(f"Write {begin} and [{add}]."),
        wrote_text(f"{begin}[{{'name': 'add'}}]"),
        wrote_text(f"{begin}"),
    ]


THINKING = [
    wrote(f"<|START_THINKING|>I add.<|END_THINKING|><|START_ACTION|>[\n    {COHERE}\n]<|END_ACTION|>", Thought("I add."), ADDED),
]
TABLES = [
    (None, "phi4", _transcripts("<|tool_call|>", "<|/tool_call|>", ADD)),
    (None, "functools", [*_transcripts("functools", "", ADD), wrote_text("import functools\n\nfunctools.partial(add)")]),
    (None, "apriel", _transcripts("<tool_calls>", "</tool_calls>", ADD)),
    (None, "nemotron", _transcripts("<TOOLCALL>", "</TOOLCALL>", ADD)),
    (None, "granite", _transcripts("<|tool_call|>", "", ADD)),
    (None, "cohere", _transcripts("<|START_ACTION|>", "<|END_ACTION|>", COHERE)),
    ("cohere", "cohere", THINKING),
]
