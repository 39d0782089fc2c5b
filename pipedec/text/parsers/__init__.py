"""The forms in which models write thoughts and calls, found by name or by chat template: one line for each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipedec.text.parsers.gemma import FUNCTIONGEMMA, GEMMA
from pipedec.text.parsers.harmony import HARMONY
from pipedec.text.parsers.hermes import HERMES
from pipedec.text.parsers.json_calls import PLAIN
from pipedec.text.parsers.json_lists import JsonLists
from pipedec.text.parsers.llama3 import LLAMA3
from pipedec.text.parsers.mistral import MISTRAL
from pipedec.text.parsers.named_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from pipedec.text.parsers.parser import ReasoningParser, ToolParser
from pipedec.text.parsers.tagged_forms import TAGGED_FORMS
from pipedec.text.parsers.think import ThinkTags

__all__ = ["PLAIN", "REASONING_PARSERS", "TOOL_PARSERS", "knows_tools", "reasoning_parser", "tool_parser"]

# The first one that fits a template is used.
_REASONING_PARSERS = (
    HARMONY,
    ThinkTags("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("mistral", "[THINK]", "[/THINK]"),
    ThinkTags("seed", "<seed:think>", "</seed:think>"),
    ThinkTags("kimi", "◁think▷", "◁/think▷"),
    ThinkTags("gemma", "<|channel>thought\n", "<channel|>", "<|channel>"),
    ThinkTags("think", "<think>", "</think>"),
)
_COHERE_FIELDS = '"tool_call_id": "0", "tool_name": "{name}", "parameters"'
_TOOL_PARSERS = (
    HARMONY,
    *TAGGED_FORMS,
    JsonLists("apriel", "<tool_calls>", "</tool_calls>", r"<tool_calls>\["),
    HERMES,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    GEMMA,
    FUNCTIONGEMMA,
    JsonLists("phi4", "<|tool_call|>", "<|/tool_call|>", r"<\|/tool_call\|>"),
    JsonLists("functools", "functools", "", r"functools\["),
    JsonLists("granite", "<|tool_call|>", "", r"<\|tool_call\|>"),
    JsonLists("cohere", "<|START_ACTION|>", "<|END_ACTION|>", r"<\|START_ACTION\|>", _COHERE_FIELDS),
    JsonLists("nemotron", "<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>"),
    LLAMA3,
)
REASONING_PARSERS: Mapping[str, ReasoningParser] = {parser.name: parser for parser in _REASONING_PARSERS}
TOOL_PARSERS: Mapping[str, ToolParser] = {parser.name: parser for parser in _TOOL_PARSERS}


def knows_tools(template: str) -> bool:
    """Whether a chat template shows the ``tools`` of a request to the model. Some only show those of a message."""
    return re.search(r"(?<!['\".])\btools\b", template) is not None


def reasoning_parser(template: str) -> ReasoningParser | None:
    """The form in which answers to prompts of a chat template have thoughts; None if none is known here."""
    return next((parser for parser in REASONING_PARSERS.values() if parser.fits(template)), None)


def tool_parser(template: str) -> ToolParser | None:
    """The form in which a chat template asks for calls; None if none is known here."""
    if not knows_tools(template):
        return None
    return next((parser for parser in TOOL_PARSERS.values() if parser.fits(template)), None)
