"""What becomes a training document, and how documents are mixed."""

import json
from pathlib import Path

from recipes.reference_models import corpus
from recipes.reference_models.corpus import Document


def test_the_library_gives_every_family() -> None:
    seen: dict[str, Document] = {}
    for document in corpus.library_documents():
        seen.setdefault(document.family, document)
        if len(seen) == 3:
            break
    assert set(seen) == {"source", "functions", "questions"}
    question = seen["questions"].text
    assert question.startswith("<|begin|><|user|>") and question.endswith("<|end|>")
    assert question.count("<|assistant|>") == 1


def test_word_problems_lose_their_calculator_notes(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "It is 2*3=<<2*3=6>>6.\n#### 6"}) + "\n")
    (document,) = corpus.word_problem_documents(path)
    assert document.text == "<|begin|><|user|>How many?<|end|><|assistant|>It is 2*3=6.\n#### 6<|end|>"


def test_mix_keeps_the_shares_and_is_reproducible() -> None:
    documents = [Document("a", f"a{number:09}") for number in range(50)] + [Document("b", f"b{number:09}") for number in range(9)]
    weights = {"a": 0.75, "b": 0.25, "absent": 1.0}
    mixed = list(corpus.mix(documents, weights, characters=4000, seed=3))
    share = sum(len(document.text) for document in mixed if document.family == "a") / 4000
    assert abs(share - 0.75) < 0.01
    assert mixed == list(corpus.mix(documents, weights, characters=4000, seed=3))
    assert [document.held_out for document in documents] == [Document("b", document.text).held_out for document in documents]
    first_epoch = [document for document in mixed if document.family == "b"][:9]
    assert len(set(first_epoch)) == 9, "every document once before any comes again"
