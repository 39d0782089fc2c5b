"""APAR's rules, and that every form of what they find gives the answer back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.thread_models.structure import Fork, ambiguity, paragraph_tree, plain_text, sentences

LIST = """Here is some advice:

1. Establish a routine: Go to bed at the same time.
2. **Manage stress:** Consider breathing
   exercises and walks.

   They help.

3. Mind `caffeine`: It stays for hours: six or more.

If it persists, ask a doctor."""
PARAGRAPHS = """Sleep matters. It repairs the body, e.g. muscles, and the mind.

So it is.

Light delays it. Screens are the worst of all!  """


def test_contents_of_an_ordered_list_are_forked() -> None:
    found = paragraph_tree(LIST)
    assert found is not None and found.rule == "list"
    assert found.pieces == (
        "Here is some advice:\n\n1. Establish a routine:",
        Fork(" Go to bed at the same time."),
        "\n2. **Manage stress:**",
        Fork(" Consider breathing\n   exercises and walks.\n\n   They help."),
        "\n\n3. Mind `caffeine`:",
        Fork(" It stays for hours: six or more."),
        "\n\nIf it persists, ask a doctor.",
    )


def test_paragraphs_are_forked_after_their_first_sentence() -> None:
    found = paragraph_tree(PARAGRAPHS)
    assert found is not None and found.rule == "paragraphs"
    assert found.pieces == (
        "Sleep matters.",
        Fork(" It repairs the body, e.g. muscles, and the mind."),
        "\n\nSo it is.\n\nLight delays it.",
        Fork(" Screens are the worst of all!"),
        "  ",
    )


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Two sentences. But nothing follows them.",
        "1. One: long enough text\n2. Two: long enough text",
        "1. One, long enough\n2. Two, long enough\n3. Three, long enough",
        "At 10:30 we met.\n\nAt 11:45 we left.",
        "- A bullet. With two sentences.\n\n- Another bullet. With two sentences.",
    ],
)
def test_other_answers_are_unstructured(answer: str) -> None:
    assert paragraph_tree(answer) is None


@pytest.mark.parametrize(
    ("addition", "name"),
    [
        ("```python\nprint()\n```", "code"),
        ("For example:\n\n    print()", "code"),
        (r"It is \(x^2\).", "math"),
        ("See https://example.com.", "address"),
        ("| a | b |", "table"),
        ("[Fork]", "control"),
        ('<promise topic="a"/>', "control"),
    ],
)
def test_ambiguous_answers_are_unstructured(addition: str, name: str) -> None:
    for answer in (LIST, PARAGRAPHS):
        assert ambiguity(answer) is None
        assert ambiguity(f"{answer}\n\n{addition}") == name
        assert paragraph_tree(f"{answer}\n\n{addition}") is None


_LINE = st.sampled_from(
    ("1. One: the first point", "2. Two: ", "3. **Three:** of them", "10. Ten:\tof them all", "   - a bullet",
     "A word. Two words",
     "And so. On it goes! ", "   3. In: an inner point", "", "", " ", "\t", "e.g. this. That", "结束。还有更多的内容在这里。")
)  # fmt: skip


@given(
    st.one_of(st.lists(_LINE, max_size=14).map("\n".join), st.text(), st.lists(st.text(" \n.1:Aa"), max_size=9).map("\n\n".join))
)
def test_every_form_gives_the_answer_back(answer: str) -> None:
    assert "".join(sentences(answer)) == answer
    found = paragraph_tree(answer)
    if found is not None:
        assert found.forks and all(len(fork.text.strip()) >= 10 for fork in found.forks)
        assert plain_text(found.pieces) == answer
