"""Train the shipped pair's draft: on text of the library, and on the target's answers to prompts made of it.

Owns which prompts the shipped draft and BiTA learn from, by family: cut out of the corpus's documents, or invented from their
words. It does not know the target's answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.text.tokenizer import load_for_training
from pipedec.train.continuations import SplitPrompts
from pipedec.train.draft import DraftRecipe, DraftShape, Text, train_draft
from pipedec.train.run import Run, card
from pipedec.verify.reference import load_transformers
from recipes.reference_models import corpus, invented_prompts
from recipes.reference_models.corpus import ASSISTANT, BEGIN, Document, conversation
from recipes.reference_models.pair import CARD, HELD_OUT_ROWS, pack, text_agreement

LONG_FAMILY = "passages"
_CHARACTERS_PER_TOKEN = 4  # an upper bound of the mean
SHORT = range(225)  # tokens of a prompt
_MIN_PASSAGE_TOKENS = 256
_MAX_DRAWS = 20  # for one prompt of a fitting length
_CUT_TOKENS = (32, 160)  # of source text, which has no question to stop at


@dataclass(frozen=True)
class LibraryRecipe:
    """The text and prompts that the shipped draft learned from."""

    text_rows: int = 500
    num_held_out_prompts: int = 48  # of each family
    text_weights: dict[str, float] = field(  # share of each family
        default_factory=lambda: {"problems": 0.3, "functions": 0.3, "questions": 0.2, "source": 0.2}
    )
    num_prompts: dict[str, int] = field(  # of each family, to learn from
        default_factory=lambda: {
            "problems": 500, "functions": 500, "questions": 400, "source": 200, "requests": 800, LONG_FAMILY: 280,
        }
    )  # fmt: skip

    def times(self, factor: int) -> LibraryRecipe:
        """So many times as much text and as many prompts to learn from."""
        num_prompts = {family: factor * count for family, count in self.num_prompts.items()}
        return replace(self, text_rows=factor * self.text_rows, num_prompts=num_prompts)


LIBRARY = LibraryRecipe()
DRAFT_RECIPE = DraftRecipe(long_sets=(LONG_FAMILY,))


def train_library_draft(
    target: Path,
    start: Path | DraftShape,
    problems: Path | None,
    recipe: DraftRecipe,
    run: Run,
    library: LibraryRecipe = LIBRARY,
    compiled: bool = True,
) -> dict[str, Any]:
    """Train the draft of a pair, a new one or one that is continued (``start``); returns what was measured.

    A model card is written beside ``training.json`` if the target was trained by ``pair``, whose report goes on. Without
    ``problems`` (GSM8K-format JSONL) the draft is trained on the standard library alone.
    """
    documents = all_documents(problems)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    prompts = library_prompts(documents, tokenizer, library, recipe)
    training, held_out = (by_family(documents, held_out) for held_out in (False, True))
    mixed = corpus.mix(
        [document for found in training.values() for document in found],
        library.text_weights,
        library.text_rows * recipe.length * _CHARACTERS_PER_TOKEN,
        recipe.seed,
    )
    rows = pack(mixed, tokenizer, recipe.length, recipe.seed)[: library.text_rows]
    held_out_rows = {
        family: pack(found, tokenizer, recipe.length, recipe.seed)[:HELD_OUT_ROWS]
        for family, found in held_out.items()
        if family in library.text_weights
    }
    of_text = partial(text_agreement, load_transformers(target, run.torch_dtype, run.device), rows_by_family=held_out_rows)
    text = Text(rows, of_text, asdict(library))
    report = train_draft(target, start, prompts, recipe, run, text, compiled)
    of_pair = target.parent / "training.json"
    if report and isinstance(start, DraftShape) and of_pair.is_file():
        report = json.loads(of_pair.read_text()) | report
    if "recipe" in report:
        run.write_report(report, card(CARD, report))
    return report


def draft_prompts(target: Path, problems: Path | None, library: LibraryRecipe, recipe: DraftRecipe) -> dict[str, SplitPrompts]:
    """The prompts that the draft learns from, by family."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    return library_prompts(all_documents(problems), tokenizer, library, recipe)


def all_documents(problems: Path | None) -> list[Document]:
    """The standard library, the help topics and, if given, word problems."""
    documents = [*corpus.library_documents(), *corpus.topic_documents()]
    return documents + list(corpus.word_problem_documents(problems)) if problems is not None else documents


def by_family(documents: list[Document], held_out: bool) -> dict[str, list[Document]]:
    """The documents of one split, by family."""
    families: dict[str, list[Document]] = {}
    for document in documents:
        if document.held_out == held_out:
            families.setdefault(document.family, []).append(document)
    return families


def library_prompts(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    library: LibraryRecipe,
    recipe: DraftRecipe,
    max_prompts: int | None = None,
) -> dict[str, SplitPrompts]:
    """Token ids of prompts, by family; ``max_prompts`` of each family at most. Families without prompts are left out."""
    training, held_out = (by_family(documents, held_out) for held_out in (False, True))
    found = {}
    for family, count in library.num_prompts.items():
        counts = (count, library.num_held_out_prompts)
        most = max_prompts if max_prompts is not None else max(counts)
        parts = (
            _prompts_of(family, families, tokenizer, min(number, most), recipe)
            for families, number in zip((training, held_out), counts, strict=True)
        )
        split = SplitPrompts(*parts)
        if split.training:
            found[family] = split
    return found


def bita_prompts(target_path: Path, problems: Path | None, new_tokens: int, max_prompts: int | None) -> dict[str, SplitPrompts]:
    """The draft's prompts, for BiTA. Raises UserError if the tokenizer does not know the library's turns."""
    max_positions = model_config(target_path).max_position_embeddings
    tokenizer = load_for_training(target_path)
    if ASSISTANT not in tokenizer.get_vocab():
        raise UserError(f"the library's prompts are for tokenizers that know {ASSISTANT}: use pipedec train bita --prompts FILE")
    recipe = DraftRecipe(new_tokens=new_tokens, long_length=min(DraftRecipe.long_length, max_positions))
    return library_prompts(all_documents(problems), tokenizer, LIBRARY, recipe, max_prompts)


def _prompts_of(
    family: str,
    families: dict[str, list[Document]],
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    recipe: DraftRecipe,
) -> list[list[int]]:
    """Token ids of prompts of one family: of its documents, or invented from the words of all documents."""
    everything = [document for found in families.values() for document in found]
    if family == "requests":
        return invented(invented_prompts.requests, everything, tokenizer, num_prompts, SHORT, recipe.seed)
    if family == LONG_FAMILY:
        tokens = range(_MIN_PASSAGE_TOKENS, recipe.long_length - recipe.new_tokens + 1)
        return invented(invented_prompts.passages, everything, tokenizer, num_prompts, tokens, recipe.seed)
    return prompts(families[family], tokenizer, num_prompts, recipe.seed) if family in families else []


def prompts(documents: list[Document], tokenizer: PreTrainedTokenizerBase, num_prompts: int, seed: int) -> list[list[int]]:
    """Token ids of ``num_prompts`` prompts: the user's turns of conversations, and pieces of source text."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < num_prompts:
        shuffled = (
            _prompt(document.text, tokenizer) or _cut(document.text, tokenizer, rng)
            for document in rng.sample(documents, len(documents))
        )
        short = [ids for ids in shuffled if len(ids) in SHORT]
        if not short:
            break
        found.extend(short)
    return found[:num_prompts]


def _prompt(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The user's turn of a conversation, up to where the assistant begins; nothing of another text."""
    question, separator, _ = text.partition(ASSISTANT)
    return tokenizer.encode(question + separator, add_special_tokens=False) if separator else []


def _cut(text: str, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> list[int]:
    """A piece of source text."""
    lines = text.removeprefix(BEGIN).splitlines(keepends=True)
    first = rng.randrange(len(lines))
    ids = tokenizer.encode(BEGIN + "".join(lines[first : first + 40]), add_special_tokens=False)
    return ids[: rng.randint(*_CUT_TOKENS)]


def invented(
    stream: Callable[[list[str], random.Random], Iterator[str]],
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    tokens: range,
    seed: int,
) -> list[list[int]]:
    """Token ids of ``num_prompts`` user turns of a stream made of the documents' prose, with numbers of tokens in ``tokens``.

    Fewer if few fit.
    """
    texts = invented_prompts.prose(documents)
    drawn = islice(stream(texts, random.Random(seed)), _MAX_DRAWS * num_prompts if texts else 0)
    turns = (_prompt(conversation(text, ""), tokenizer) for text in drawn)
    return list(islice((ids for ids in turns if len(ids) in tokens), num_prompts))
