"""Continue the shipped pair's draft: on text of the library, and on the target's answers to prompts made of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pipedec.train.draft.training import DraftRecipe, Text, train_draft
from pipedec.train.report import card
from pipedec.train.run import Run
from recipes.reference_models import corpus
from recipes.reference_models.corpus import Document
from recipes.reference_models.document_prompts import (
    LIBRARY,
    LONG_FAMILY,
    LibraryRecipe,
    all_documents,
    by_family,
    library_prompts,
)
from recipes.reference_models.pair import CARD, HELD_OUT_ROWS, pack

DRAFT_RECIPE = DraftRecipe(long_sets=(LONG_FAMILY,))
_CHARACTERS_PER_TOKEN = 4  # an upper bound of the mean


def continue_library_draft(
    pair: tuple[Path, Path],
    problems: Path | None,
    recipe: DraftRecipe,
    run: Run,
    library: LibraryRecipe = LIBRARY,
    compiled: bool = True,
) -> dict[str, Any]:
    """Train the draft of a pair (target, draft) further; returns what was measured.

    A model card is written beside ``training.json`` if the pair was trained by ``pair``.

    Args:
        problems: GSM8K-format JSONL; None = train on the standard library alone.
    """
    target_path, draft_path = pair
    documents = all_documents(problems)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target_path)
    prompts = library_prompts(documents, tokenizer, library, recipe)
    text = library_text(documents, tokenizer, library, recipe)
    report = train_draft(target_path, draft_path, prompts, recipe, run, text, compiled)
    if "recipe" in report:
        (run.out / "README.md").write_text(card(CARD, report))
    return report


def library_text(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, library: LibraryRecipe, recipe: DraftRecipe
) -> Text:
    """Rows of the training documents, each family with its share, and rows of the held-out ones."""
    training, held_out = (by_family(documents, held_out) for held_out in (False, True))
    mixed = corpus.mix(
        [document for found in training.values() for document in found],
        library.text_weights,
        library.text_rows * recipe.length * _CHARACTERS_PER_TOKEN,
        recipe.seed,
    )
    rows: Tensor = pack(mixed, tokenizer, recipe.length, recipe.seed)[: library.text_rows]
    held_out_rows = {
        family: pack(iter(found), tokenizer, recipe.length, recipe.seed)[:HELD_OUT_ROWS]
        for family, found in held_out.items()
        if family in library.text_weights
    }
    return Text(rows, held_out_rows, asdict(library))
