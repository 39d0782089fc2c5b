"""Transcripts of calls with tagged parameters that are alike in every such form."""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.text.parsers.tagged_calls import TaggedCalls
from support.transcripts import Call, Transcript, wrote, wrote_text

CODE = 'if a < b:\n    print("</function>", \'<x>\')\n\n# "quoted" \\ \tü😀'
IN_JSON = 'if a < b:\\n    print(\\"</function>\\", \'<x>\')\\n\\n# \\"quoted\\" \\\\ \\tü😀'
STRINGS = ("city", "units", "text")  # keys of texts


def call_of(form: TaggedCalls, name: str, *parameters: tuple[str, str], strings: Sequence[str] = STRINGS) -> str:
    """A call as the form writes it, without what is around all calls."""

    def begin(key: str) -> str:
        return form.parameter.format(key=key, is_string="true" if key in strings else "false")

    written = "".join(begin(key) + value + form.end_parameter for key, value in parameters)
    return form.call.format(name=name) + written + form.end_call


def answer_of(form: TaggedCalls, *calls: str) -> str:
    if form.is_joint:
        return form.begin + form.separator.join(calls) + form.end
    return form.separator.join(form.begin + call + form.end for call in calls)


def briefly(form: TaggedCalls) -> list[Transcript]:
    """For forms that differ from others in nothing but their tags."""
    add = call_of(form, "add", ("a", "1"))
    one, added = answer_of(form, add), Call("add", '{"a": 1}')
    unknown = answer_of(form, call_of(form, "other", ("text", "<b>")))
    note = answer_of(form, call_of(form, "note", ("text", CODE), ("tags", '{"a": [1, {"b": "}"}]}')))
    outside = form.begin.strip()
    found = [
        wrote(answer_of(form, add, call_of(form, "get.time-now")), added, Call("get.time-now", "{}")),
        wrote(f"I look.\n\n{one}\n", "I look.", added),
        wrote(note, Call("note", f'{{"text": "{IN_JSON}", "tags": {{"a": [1, {{"b": "}}"}}]}}}}')),
        wrote(f"{unknown}\n{one}", unknown, added),
        wrote(f"{outside}\n{one}", outside, added),
        wrote(one.replace("\n", ""), added),
        wrote(one.replace("><", ">\n<"), added),
        wrote(note[: note.index("<x>") + 2], Call("note", '{"text": "' + IN_JSON[: IN_JSON.index("<x>") + 2])),
    ]
    if form.call_mark:
        found.append(wrote(f"I look.\n{one.removeprefix(form.begin)}", "I look.", added))
    return found


def fully(form: TaggedCalls) -> list[Transcript]:
    def call(name: str, *parameters: tuple[str, str]) -> str:
        return answer_of(form, call_of(form, name, *parameters))

    add = call_of(form, "add", ("a", "1"))
    one, added = answer_of(form, add), Call("add", '{"a": 1}')
    outside = form.begin.strip()
    found = [
        wrote(""),
        wrote_text("a < b <tool <"),
        wrote(one, added),
        wrote(f"{one}\nDone. ", added, "\nDone. "),
        wrote(f"{one}\n\nAnd\n\n{one}\n", added, "\n\nAnd", added),
        wrote(answer_of(form, add, add, add), added, added, added),
        wrote(call("weather", ("city", "Paris"), ("days", "3"), ("units", "C")),
              Call("weather", '{"city": "Paris", "days": 3, "units": "C"}')),
        wrote(call("note", ("text", "")), Call("note", '{"text": ""}')),
        wrote(call("note", ("text", "\n 1 \n")), Call("note", '{"text": "\\n 1 \\n"}')),
        wrote(call("get.time-now", ("zone", '"UTC"'), ("x y", "5")), Call("get.time-now", '{"zone": "UTC", "x y": 5}')),
        wrote(call("add", ("a", "one"), ("more", "[1,\n 2]")), Call("add", '{"a": "one", "more": [1,\n 2]}')),
        wrote(call("add", ("a", "1"), ("a", "2"), ("b", "3")), Call("add", '{"a": 1, "b": 3}')),
        # unknown tools, and what is no call
        wrote_text(call("other", ("text", "<b>"))),
        wrote_text(f"Use {outside} to call."),
        wrote_text(f"{outside}\n{{}}"),
        # cut
        wrote(one[: one.index("1") + 1], Call("add", '{"a": ')),
        wrote_text(one[: one.index("add") + 2]),
        wrote(one[: -len(form.end + form.end_call)], Call("add", '{"a": 1')),
    ]  # fmt: skip
    if form.end:
        found.append(wrote(f"{one[: -len(form.end)]}\nDone.", added, "\nDone."))
    return briefly(form) + found
