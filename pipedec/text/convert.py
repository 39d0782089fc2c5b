"""Tokenizers as transformers has them: for training, and for checkpoints that have no ``tokenizer.json``.

Loads transformers, and so torch: only ranks and training import it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pipedec.core import UserError
from pipedec.gguf import model_files
from pipedec.text.tokenizer import Tokenizer


def load_for_training(directory: Path) -> Any:
    """The tokenizer of transformers, which can be changed and saved. Raises UserError if there is none, or a damaged one."""
    directory = model_files(directory)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError(f"no tokenizer in {directory}: expected tokenizer.json beside config.json")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # tokenizers raises a bare Exception for a corrupt file
        raise UserError(f"the tokenizer in {directory} cannot be read: {str(error).splitlines()[0][:160]}") from error


def converted(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint that has another format, such as ``tokenizer.model``. Raises UserError if there is none."""
    with tempfile.TemporaryDirectory(prefix="pipedec-") as written:
        load_for_training(directory).save_pretrained(written)
        tokenizer = Tokenizer(Path(written))
    tokenizer.directory = directory
    return tokenizer
