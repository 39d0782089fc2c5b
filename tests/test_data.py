"""Prompt files in every format, and the errors for those that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pipedec.core.errors import UserError
from pipedec.data import PromptSet, PromptSource, read_prompts


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_usual_fields_are_found_unless_another_is_given(tmp_path: Path) -> None:
    for field in ("prompt", "question", "turns", "request", "text", "instruction"):
        file = write(tmp_path / "set.jsonl", [{"id": 1, field: "Größe?"}, {field: "How many?", "extra": None}])
        assert read_prompts(file) == PromptSet("set", ("Größe?", "How many?"))
    file = write(tmp_path / "set.jsonl", [{"prompt": "one", "other": "two"}])
    assert read_prompts(file, "other").prompts == ("two",)
    with pytest.raises(UserError, match="has no field 'answer': choose one of prompt, other"):
        read_prompts(file, "answer")


def test_the_first_turn_of_a_conversation_is_the_prompt(tmp_path: Path) -> None:
    file = write(tmp_path / "mt.jsonl", [{"turns": ["first", "second"]}])
    assert read_prompts(file).prompts == ("first",)


def test_gzip_is_recognised_by_content_and_csv_has_commas_and_line_breaks(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "a"}\n\n{"prompt": "b"}\n'))
    assert read_prompts(file) == PromptSet("set", ("a", "b"))
    file = tmp_path / "set.csv"
    file.write_text('id,prompt\n1,"one, two\nthree"\n2,four\n')
    assert read_prompts(file).prompts == ("one, two\nthree", "four")


def test_line_separators_within_a_text_do_not_end_its_line(tmp_path: Path) -> None:
    """JSON does not escape U+2028 and U+0085."""
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(file).prompts == ("a\u2028b\x85c",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "holds no prompts: it is empty"),
        ("blank.jsonl", b"\n\n", "holds no prompts: it is empty"),
        ("header.csv", b"prompt\n", "holds no prompts: it is empty"),
        ("text.jsonl", b"How many?\n", "line 1: not a JSON document"),
        ("half.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2: not a JSON document"),
        ("list.jsonl", b'["a"]\n', "line 1: not a JSON object"),
        ("field.jsonl", b'{"colour": "red"}\n', "has no field 'prompt': choose one of colour"),
        ("number.jsonl", b'{"prompt": 5}\n', "record 1: the field 'prompt' holds no text"),
        ("missing.jsonl", b'{"prompt": "a"}\n{"colour": "b"}\n', "record 2: the field 'prompt' holds no text"),
        ("turns.jsonl", b'{"turns": []}\n', "record 1: the field 'turns' holds no text"),
        ("blank.csv", b"prompt,id\n ,1\n", "record 1: the field 'prompt' holds no text"),
        ("latin.jsonl", b'{"prompt": "caf\xe9"}\n', "neither UTF-8 text nor a complete gzip file"),
        ("half.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n')[:-6], "neither UTF-8 text nor a complete gzip file"),
        ("noise.jsonl.gz", b"\x1f\x8bnoise", "cannot read|neither UTF-8 text nor a complete gzip file"),
        ("damaged.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n')[:10] + b"\xff" * 20, "cannot read|neither UTF-8 text nor"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.count(".") and " " not in value else "",
)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        read_prompts(file)
    assert name in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot read"):
            read_prompts(path)


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    whole = PromptSet("set", tuple(map(str, range(50))))
    drawn = whole.sample(10)
    assert drawn == whole.sample(10) and drawn != whole.sample(10, seed=1)
    assert len(set(drawn.prompts)) == 10 and set(drawn.prompts) <= set(whole.prompts)
    assert sorted(whole.sample(99).prompts) == sorted(whole.prompts)


def test_parsing_a_source() -> None:
    for text, expected in (
        ("some/HumanEval.jsonl.gz", PromptSource("HumanEval", Path("some/HumanEval.jsonl.gz"))),
        ("math=gsm8k/test.jsonl", PromptSource("math", Path("gsm8k/test.jsonl"))),
        ("q.jsonl#category=qa", PromptSource("qa", Path("q.jsonl"), "category", ("qa",))),
        ("bench=q.jsonl#category=stem,math", PromptSource("bench", Path("q.jsonl"), "category", ("stem", "math"))),
        ("q.jsonl#category=stem,math", PromptSource("q", Path("q.jsonl"), "category", ("stem", "math"))),
    ):
        assert PromptSource.parse(text) == expected
    for text in ("", "=file", "name=", "file#", "file#category", "file#=qa", "#category=qa"):
        with pytest.raises(UserError, match="is not a source of prompts: write FILE"):
            PromptSource.parse(text)


def test_records_are_chosen_by_a_field(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"category": name, "prompt": f"{name}?"} for name in ("qa", "rag", "qa")])
    assert PromptSource.parse(f"{path}#category=qa").read() == PromptSet("qa", ("qa?", "qa?"))
    with pytest.raises(UserError, match="has no record with the requested 'category'; its values are qa, rag"):
        PromptSource.parse(f"{path}#category=sums").read()
