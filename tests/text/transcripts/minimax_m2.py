"""``<invoke name="…">`` in ``<minimax:tool_call>``, as MiniMax M2 writes it; with thoughts."""

from __future__ import annotations

from support.tagged import fully
from support.transcripts import Call, wrote

from pipedec.text.parsers.reader import Thought
from pipedec.text.parsers.tagged_forms import MINIMAX_M2

INVOKE = '<invoke name="{}">\n<parameter name="a">1</parameter>\n</invoke>\n'
ADD = f"<minimax:tool_call>\n{INVOKE.format('add')}</minimax:tool_call>"
ADDED = Call("add", '{"a": 1}')
MIXED = f"<minimax:tool_call>\n{INVOKE.format('add')}{INVOKE.format('other')}{INVOKE.format('add')}</minimax:tool_call>"
CALLS = [
    wrote(ADD, ADDED),
    wrote(MIXED, ADDED, f"\n{INVOKE.format('other')}".rstrip(), ADDED),
    wrote(f"{ADD}\n{ADD}", ADDED, ADDED),
]
THINKING = [wrote(f"I add.\n</think>\n\n{ADD}", Thought("I add."), ADDED, prompt="]~b]ai\n<think>\n")]
TABLES = [(None, "minimax_m2", fully(MINIMAX_M2) + CALLS), ("think", "minimax_m2", THINKING)]
