"""The scripts that move modules, and that find words and openings in prose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import move_module, words
from support.move_module import rewrite_imports, rewrite_names, rewrite_paths


def test_imports_name_the_new_module() -> None:
    for before, after in (
        ("from a.old import x, y as z\n", "from b.new import x, y as z\n"),
        ("from a.old.deep import x\n", "from b.new.deep import x\n"),
        ("from a import old as o, other  # why\n", "from a import other\nfrom b import new as o  # why\n"),
        ("from a import (\n    old,\n    other,\n)\n", "from a import other\nfrom b import new as old\n"),
        ("from a.older import x\nfrom a import older\n", "from a.older import x\nfrom a import older\n"),
    ):
        assert rewrite_names(rewrite_imports(before, "a.old", "b.new"), "a.old", "b.new") == after


def test_dotted_names_and_paths_are_replaced_whole() -> None:
    assert rewrite_names("'a.old.f' a.older xa.old a.old", "a.old", "b.new") == "'b.new.f' a.older xa.old b.new"
    old, new = Path("pipedec/engine/old.py"), Path("pipedec/stage/new.py")
    text = "`pipedec/engine/old.py`, `engine/old.py`, `my/engine/old.py`"
    assert rewrite_paths(text, old, new) == "`pipedec/stage/new.py`, `stage/new.py`, `my/engine/old.py`"


def test_a_repository_runs_after_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "package/__init__.py": "",
        "package/old.py": "def word() -> str:\n    return __name__\n",
        "main.py": "import package.old\nfrom package import old\n\nprint(old.word(), package.old.word())\n",
        "README.md": "See `package/old.py`, or `python -m package.old`.\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    move_module.main(["package/old.py", "package/inner.py"])
    ran = subprocess.run([sys.executable, "main.py"], check=True, capture_output=True, text=True)
    assert ran.stdout == "package.inner package.inner\n"
    assert (tmp_path / "README.md").read_text() == "See `package/inner.py`, or `python -m package.inner`.\n"
    with pytest.raises(SystemExit, match="does not exist"):
        move_module.main(["package/old.py", "package/inner.py"])


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
