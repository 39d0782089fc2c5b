"""Answers in every form: in whichever pieces they come, they are divided alike, and nothing that a model writes is an error."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_templates import (
    DEEPSEEK_V4_TEMPLATE,
    DEEPSEEK_V32_TEMPLATE,
    GLM45_TEMPLATE,
    GLM47_TEMPLATE,
    HERMES_TEMPLATE,
    LLAMA3_TEMPLATE,
    MINIMAX_M2_TEMPLATE,
    MISTRAL_TEMPLATE,
    OTHER_TEMPLATE,
    QWEN3_CODER_TEMPLATE,
    SEED_OSS_TEMPLATE,
    STEP3_TEMPLATE,
)
from support.transcripts import SCHEMAS, Call, Transcript
from text import transcripts

from pipedec.text.parsers import PLAIN, REASONING_PARSERS, TOOL_PARSERS, knows_tools, reasoning_parser, tool_parser
from pipedec.text.parsers.parser import ReasoningParser
from pipedec.text.parsers.reader import AnswerReader, CallPart, Part, Thought

Parts = list[str | Thought | Call]


def all_transcripts() -> list[tuple[str, str | None, str | None, Transcript]]:
    """Each with an id and the names of its parsers."""
    found = []
    for info in pkgutil.iter_modules(transcripts.__path__):
        for reasoning, tools, table in importlib.import_module(f"{transcripts.__name__}.{info.name}").TABLES:
            name = "-".join(dict.fromkeys(part for part in (info.name, reasoning, tools) if part))
            found += [(f"{name}-{index}", reasoning, tools, transcript) for index, transcript in enumerate(table)]
    return found


_TABLE = all_transcripts()
TRANSCRIPTS = pytest.mark.parametrize(
    ("reasoning", "tools", "transcript"), [row[1:] for row in _TABLE], ids=[row[0] for row in _TABLE]
)
FORMS = [(reasoning, None) for reasoning in REASONING_PARSERS] + [("think", name) for name in (*TOOL_PARSERS, "plain")]
FORMS += [("harmony", "harmony")]


def reader_of(reasoning: str | None, tools: str | None, prompt: str = "") -> AnswerReader:
    parsers = {**TOOL_PARSERS, "plain": PLAIN}
    return AnswerReader(
        None if reasoning is None else REASONING_PARSERS[reasoning], None if tools is None else parsers[tools], SCHEMAS, prompt
    )


def joined(parts: Iterable[Part]) -> Parts:
    """With no two texts or thoughts in a row, and each call as a whole."""
    result: Parts = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, CallPart) and part.name is not None:
            assert part.index == sum(isinstance(one, Call) for one in result)
            result.append(Call(part.name, part.arguments))
        elif isinstance(part, CallPart):
            assert isinstance(last, Call) and part.index == sum(isinstance(one, Call) for one in result) - 1
            result[-1] = Call(last.name, last.arguments + part.arguments)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + part.text)
        elif isinstance(part, str) and isinstance(last, str):
            result[-1] = last + part
        else:
            result.append(part)
    return result


def read(reader: AnswerReader, pieces: Iterable[str]) -> Parts:
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.finish()
    assert all(part not in ("", Thought("")) for part in parts)
    result = joined(parts)
    assert reader.num_calls == sum(isinstance(part, Call) for part in result)
    return result


@TRANSCRIPTS
def test_an_answer_is_divided_alike_in_whichever_pieces_it_comes(
    reasoning: str | None, tools: str | None, transcript: Transcript
) -> None:
    text = transcript.text
    for pieces in ([text], text, *([text[:place], text[place:]] for place in range(len(text)))):
        assert read(reader_of(reasoning, tools, transcript.prompt), pieces) == list(transcript.parts)


@TRANSCRIPTS
def test_an_answer_may_end_anywhere_and_what_was_passed_on_before_stays(
    reasoning: str | None, tools: str | None, transcript: Transcript
) -> None:
    for length in range(len(transcript.text)):
        reader = reader_of(reasoning, tools, transcript.prompt)
        before = reader.add(transcript.text[:length])
        assert is_beginning(joined(before), list(transcript.parts))
        assert is_beginning(joined(before), joined(before + reader.finish()))
        assert reader.finish() == []


def is_beginning(parts: Parts, whole: Parts) -> bool:
    """Whether the last of some parts may go on to become the whole."""
    if not parts or len(parts) > len(whole):
        return not parts
    last, same = parts[-1], whole[len(parts) - 1]
    if isinstance(last, Call) and isinstance(same, Call):
        goes_on = last.name == same.name and same.arguments.startswith(last.arguments)
    elif isinstance(last, Thought) and isinstance(same, Thought):
        goes_on = same.text.startswith(last.text)
    else:
        goes_on = isinstance(last, str) and isinstance(same, str) and same.startswith(last)
    return goes_on and parts[:-1] == whole[: len(parts) - 1]


PIECES = sorted({
    "\n", " ", "; ", "{", "}", "x", '"', ",", "<", '{"name": "add", "arguments": {"a": "}"}}', '{"name": "add"', "Größe",
    *(text[first:last] for _, _, _, transcript in _TABLE if (text := transcript.text)
      for first, last in pairwise((0, len(text) // 3, len(text) // 2, len(text)))),
    *(mark for parser in (*REASONING_PARSERS.values(), *TOOL_PARSERS.values()) for mark in parser.special),
})  # fmt: skip


@pytest.mark.parametrize(("reasoning", "tools"), FORMS)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.data())
def test_any_text_is_divided_alike_in_any_pieces(reasoning: str, tools: str | None, text: str, data: st.DataObject) -> None:
    whole = read(reader_of(reasoning, tools), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    assert read(reader_of(reasoning, tools), pieces) == whole == read(reader_of(reasoning, tools), text)


def test_arguments_and_thoughts_are_passed_on_as_they_come() -> None:
    reader = reader_of("think", "hermes")
    assert reader.add("<think>\nHm, ") == [Thought("Hm,")]
    assert reader.add("so</think>Yes. ") == [Thought(" so"), "Yes."]
    assert reader.add(' <tool_call>\n{"name": "add", "argu') == []
    assert reader.add('ments": {"a": ') == [CallPart(0, "add", ""), CallPart(0, None, '{"a": ')]
    assert reader.add("12") == [CallPart(0, None, "12")] and reader.num_calls == 1
    assert reader.add('}}\n</tool_call>\n<tool_call>{"name": "we') == [CallPart(0, None, "}")]
    assert reader.finish() == ['\n<tool_call>{"name": "we']


def test_values_between_tags_are_passed_on_as_they_come() -> None:
    reader = reader_of("think", "qwen3_coder")
    assert reader.add("I look.\n<tool_call>\n<function=weather>\n<param") == ["I look."]
    assert reader.add("eter=city>\nPa") == [CallPart(0, "weather", ""), CallPart(0, None, '{"city": '), *text_parts('"', "Pa")]
    assert reader.add("ris\n") == text_parts("ris") and reader.num_calls == 1
    assert reader.add("</parameter>\n<parameter=days>\n1") == text_parts('"', ', "days": ')
    assert reader.add("2\n</parameter>\n</fun") == text_parts("12", "}")
    assert reader.finish() == []


def text_parts(*texts: str) -> list[CallPart]:
    return [CallPart(0, None, text) for text in texts]


@pytest.mark.parametrize(
    ("tools", "repeated"),
    [
        ("hermes", "<tool_call>{"), ("hermes", '<tool_call>{"'), ("hermes", " "), ("hermes", "\n<"), ("hermes", "<think>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"'), ("llama3", "{"), ("llama3", '{"a":"'), ("llama3", "<function="),
        ("llama3", '<function=add>{"'), ("harmony", "<|channel|>"), ("harmony", "<|start|>assistant"), ("harmony", "to="),
        ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS][{"), ("mistral", "[TOOL_CALLS]add[ARGS]{"),
        ("functools", "functools"), ("phi4", '<|tool_call|>[{"name": "add", "arguments": {}}, '),
        ("kimi_k2", "<|tool_call_begin|>"), ("gemma", "<|tool_call>"), ("gemma", "<|tool_call>call:add{a:["),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        ("qwen3_coder", "<tool_call>"), ("qwen3_coder", "<function=add>"), ("qwen3_coder", "<function=add><parameter=a>\n\n"),
        ("qwen3_coder", "<function=note><parameter=text></parameter>"),
        ("minimax_m2", '<invoke name="note"><parameter name="text">\n'),
    ],
)  # fmt: skip
def test_the_time_for_an_answer_does_not_grow_faster_than_its_length(tools: str, repeated: str) -> None:
    reader, text, started = reader_of("think", tools), repeated * (30_000 // len(repeated)), time.process_time()
    for piece in text:
        reader.add(piece)
    reader.finish()
    read(reader_of("think", tools), [text])
    assert time.process_time() - started < 2


def test_a_long_document_that_may_be_a_call_until_its_end_is_read_once() -> None:
    reader, started = reader_of("think", "llama3"), time.process_time()
    assert [part for piece in ['{"', *["text"] * 200_000] for part in reader.add(piece)] == []
    assert reader.finish() == ['{"' + "text" * 200_000]
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (HERMES_TEMPLATE, None, "hermes"),
        (LLAMA3_TEMPLATE, None, "llama3"),
        (MISTRAL_TEMPLATE, None, "mistral"),
        (OTHER_TEMPLATE, None, None),
        (HERMES_TEMPLATE + "<think>\n", "think", "hermes"),
        ("{% if tools %}{% endif %}<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", None),
        (f"{QWEN3_CODER_TEMPLATE}<think>\n", "think", "qwen3_coder"), (SEED_OSS_TEMPLATE, "seed", "seed_oss"),
        (GLM45_TEMPLATE, "think", "glm45"), (GLM47_TEMPLATE, "think", "glm47"), (MINIMAX_M2_TEMPLATE, "think", "minimax_m2"),
        (DEEPSEEK_V32_TEMPLATE, "think", "deepseek_v32"), (DEEPSEEK_V4_TEMPLATE, "think", "deepseek_v4"),
        (STEP3_TEMPLATE, "think", "step3"),
        ("[THINK]", "mistral", None), ("{{ '</seed:think>' }}", "seed", None), ("<|START_THINKING|>", "cohere", None),
        ("◁think▷", "kimi", None), ("<tool_call>", None, None), ("{{ messages[0].content }}", None, None),
        ("{% if tools %}{% endif %}{{ '<｜tool▁sep｜>' + name + '\\n' + '```json' }}</think>", "think", "deepseek_v3"),
        ("{% if tools %}{% endif %}{{ name + '<｜tool▁sep｜>' }}</think>", "think", "deepseek_v31"),
        ("{% if tools -%}{{ '<|im_system|>tool_declare<|im_middle|>' }}{% endif %}", None, "kimi_k2"),
        ("{% if tools %}<|tool_call>call:{<|\"|><tool_call|>{% endif %}<|channel>thought\\n<channel|>", "gemma", "gemma"),
        ("{% if tools %}<start_function_call>call:{{ name }}{<escape>{% endif %}", None, "functiongemma"),
        ("{% if tools %}<|tool_call|>[]<|/tool_call|>{% endif %}", None, "phi4"),
        ("{% if tools %}<TOOLCALL>[{{ call }}]</TOOLCALL>{% endif %}<think>", "think", "nemotron"),
        ("{% if tools %}in <tool_call> tags: <tool_calls>[{\"name\": 1, \"arguments\": 2}]</tool_calls>{% endif %}",
         None, "apriel"),
        ("{% if tools %}<tool_call>\\n{{ '{\"name\": ' + name + ', \"arguments\": ' }}{% endif %}</think>", "think", "hermes"),
        ("{% if tools %}<|tool_calls_section_begin|>{% endif %}<think></think>", "think", "kimi_k2"),
        ("{% if tools %}Use exact format: [func_name1(param1=value1), func_name2(...)]{% endif %}", None, None),
        ("{% for tool in message['tool_calls'] %}{{ '<｜tool▁sep｜>' }}{% endfor %}</think>", "think", None),
        ("{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}", None, None),
        ("{% if tools %}formatted as functools[{}]{% endif %}", None, "functools"),
        ("{% if tools %}respond only with <|tool_call|> followed by a JSON list{% endif %}", None, "granite"),
        ('{% if tools %}{"name": "{{ name }}", "parameters": {}}{% endif %}<|START_THINKING|> <|START_ACTION|>',
         "cohere", "cohere"),
    ],
)  # fmt: skip
def test_templates_show_their_form(template: str, reasoning: str | None, tools: str | None) -> None:
    found = reasoning_parser(template), tool_parser(template)
    assert tuple(parser and parser.name for parser in found) == (reasoning, tools)


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        (MISTRAL_TEMPLATE, True),
        ("{% if tools is defined %}{% endif %}", True),
        ("{{ messages[0].content }}", False),
        ("{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + message.tools }}{% endif %}", False),
    ],
)
def test_templates_know_tools_if_they_read_those_of_a_request(template: str, knows: bool) -> None:
    assert knows_tools(template) is knows


@pytest.mark.parametrize("parser", REASONING_PARSERS.values(), ids=lambda parser: parser.name)
def test_a_thought_is_read_between_the_marks_of_its_parser(parser: ReasoningParser) -> None:
    written = f"{parser.begin}Hm.{parser.end}{parser.before_text}Yes."
    assert read(AnswerReader(parser, None), [written]) == [Thought("Hm."), "Yes."]
    assert read(AnswerReader(parser, None, prompt=f"Hi{parser.begin}"), [written.removeprefix(parser.begin)]) == [
        Thought("Hm."),
        "Yes.",
    ]
