"""Fine-tune a target for threads (APAR §3, PASTA-SFT): annotated files in, a checkpoint directory out.

Owns what goes into a run and what comes out of it: model and tokenizer, held-out samples, the report and the model card.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipedec.core import UserError
from pipedec.engine.prompt import Prompter
from pipedec.engine.spec import DTYPES
from pipedec.model import ModelConfig
from pipedec.model.bita import fingerprint
from pipedec.train.annotated import Annotated, read_annotated
from pipedec.train.thread_samples import Sample, Writer, with_marker
from pipedec.train.thread_trainer import ThreadRecipe, ThreadTrainer


def tune(
    target_path: Path,
    files: dict[str, tuple[Path, ...]],
    out: Path,
    work: Path,
    recipe: ThreadRecipe,
    dtype: str,
    threads: int,
    device: torch.device,
) -> dict[str, Any]:
    """Train and write ``out``: the model in bfloat16 with its tokenizer, ``training.json`` and a model card.

    Args:
        files: annotated answers, by dialect.
        work: where log and checkpoint live; a second run goes on from them.
        dtype: what forwards compute in; the weights that are trained are float32.

    Raises:
        UserError: target, files or ``work`` are not fit for it.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)
    config = ModelConfig.from_directory(target_path)
    tokenizer = Prompter(target_path, config.max_positions).tokenizer
    if tokenizer.chat_template is None:
        raise UserError(f"{target_path} has no chat template, which tells a model in what dialect to answer")
    tokenizer.chat_template = with_marker(tokenizer.chat_template)
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32, local_files_only=True).to(device)
    writer = Writer(tokenizer, files, int(tokenizer.eos_token_id))
    records = {dialect: [record for path in paths for record in read_annotated(path, dialect)] for dialect, paths in files.items()}
    training, held_out = (_samples(writer, records, held_out=split) for split in (False, True))
    samples = [sample for found in training.values() for sample in found]
    ThreadTrainer("threads", model, writer, samples, recipe, work, DTYPES[dtype], {"target": fingerprint(target_path)}).run()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    report = {"recipe": asdict(recipe)}
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def _samples(writer: Writer, records: dict[str, list[Annotated]], held_out: bool) -> dict[str, list[Sample]]:
    return {
        dialect: [writer.sample(record, dialect) for record in found if record.question.held_out == held_out]
        for dialect, found in records.items()
    }
