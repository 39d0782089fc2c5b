"""The form of Hermes and Qwen: JSON objects between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipedec.text.parsers.json_calls import JsonCalls


@dataclass(frozen=True)
class Hermes(JsonCalls):
    def fits(self, template: str) -> bool:
        is_json = "<function=" not in template and re.search(r'arguments\\?"', template) is not None
        return is_json and "<tool_call>" in template


HERMES = Hermes("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments")
