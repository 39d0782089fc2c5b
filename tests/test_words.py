"""The script that finds words and openings in prose, on texts and on the package itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import words

SOURCE = '''"""Run the pipeline.

Nobody waits for it; every name, like ``told``, stays.
"""


def width(said: list[int]) -> int:
    """Of a tree."""
    # one row behind the root
    behind = f"{said} was told to nobody"  # words: ok
    raise ValueError(f"stage {behind} was told twice")
'''


def test_docstrings_comments_and_messages_are_read_and_names_are_not() -> None:
    assert words.in_python(SOURCE) == [
        (3, "Nobody waits for it; every name, like ``told``, stays."),
        (8, "Of a tree."),
        (9, "# one row behind the root"),
        (11, "stage … was told twice"),
    ]


def test_markdown_is_read_without_code() -> None:
    for text, num_found in (
        ("Whether the run recovers. Let the stages know.", 0),
        ("Ranks behind a NAT need `nobody` to be told.", 1),
        ("Rows enter behind\nit. Whoever waits is served.", 2),
        ("```\necho nobody\n```\n\n    nobody\n", 0),
    ):
        assert len(words.in_markdown(text)) == num_found


def test_fragments_are_found_in_help_texts() -> None:
    for text, is_fragment in (("Of a tree.", True), ("What is new.", True), ("What is new?", False), ("Offset.", False)):
        assert bool(words.in_python(f"x: Annotated[int, Help({text!r})]")) == is_fragment


def test_findings_in_the_files_of_folders_are_printed_with_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, plain = tmp_path / "folder" / "page.md", tmp_path / "plain.md"
    page.parent.mkdir()
    page.write_text("First line.\n\nIt is told.\n")
    (tmp_path / "folder" / "picture.png").write_text("told")
    plain.write_text("First line.\n")
    assert (words.main([str(tmp_path)]), words.main([str(plain)])) == (1, 0)
    assert capsys.readouterr().out == f"{page}:3: It is told.\n"
