"""Tags with ``｜DSML｜``, as DeepSeek V3.2 and V4 write them; with thoughts."""

from __future__ import annotations

from support.tagged import briefly, fully
from support.transcripts import Call, wrote

from pipedec.text.parsers.reader import Thought
from pipedec.text.parsers.tagged_forms import DEEPSEEK_V4, DEEPSEEK_V32

NOTE = """<｜DSML｜function_calls>
<｜DSML｜invoke name="note">
<｜DSML｜parameter name="text" string="{}">{}</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
CALLS = [
    wrote(NOTE.format("true", "5"), Call("note", '{"text": "5"}')),
    wrote(NOTE.format("false", "5"), Call("note", '{"text": 5}')),
    wrote(NOTE.format("false", "null"), Call("note", '{"text": null}')),
    wrote(NOTE.format("false", "None"), Call("note", '{"text": "None"}')),
    wrote(NOTE.format("", "5"), Call("note", '{"text": 5}')),
]
THINKING = [wrote("Hm.</think>" + NOTE.format("true", "a"), Thought("Hm."), Call("note", '{"text": "a"}'), prompt="<think>")]
TABLES = [
    (None, "deepseek_v32", fully(DEEPSEEK_V32) + CALLS),
    (None, "deepseek_v4", briefly(DEEPSEEK_V4)),
    ("think", "deepseek_v32", THINKING),
]
