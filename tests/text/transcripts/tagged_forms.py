"""Calls in forms that differ from others in nothing but their tags: Seed-OSS, with thoughts, and Step 3."""

from __future__ import annotations

from support.tagged import briefly
from support.transcripts import Call, wrote

from pipedec.text.parsers.reader import Thought
from pipedec.text.parsers.tagged_forms import SEED_OSS, STEP3

SEED_ADD = "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>"
SEED_THINKING = [wrote(f"<seed:think>Hm.</seed:think>\n{SEED_ADD}", Thought("Hm."), Call("add", '{"a": 1}'))]
TABLES = [(None, "seed_oss", briefly(SEED_OSS)), ("seed", "seed_oss", SEED_THINKING), (None, "step3", briefly(STEP3))]
