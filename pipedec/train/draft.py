"""Continue the draft of a trained pair against its frozen target, on text and on what the target says by itself.

Owns the recipe: which rows, how many steps, which loss, what is measured. What the target thinks of every row is computed
once and kept on disk (its last hidden states; the head is cheap), so that a draft can see the rows several times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pipedec.core import UserError
from pipedec.train import corpus
from pipedec.train.continuations import (
    Continuation,
    Rows,
    continue_greedily,
    pack_whole,
    passage_prompts,
    prompts,
    request_prompts,
)
from pipedec.train.corpus import Document
from pipedec.train.model_card import model_card
from pipedec.train.reference import evaluate, pack
from pipedec.train.trainer import Trainer

_HIDDEN_ROWS = 64  # per file
_CHARACTERS_PER_TOKEN = 4  # rather more than there are


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that decides the result; a step is ``batch`` rows, ``long_batch`` of which have ``long_length`` tokens.

    The draft learns (1 − ``greedy_share``) of the target's distribution and ``greedy_share`` of its likeliest token. Where the
    target has said the next token by itself, it counts ``answer_weight`` times.
    """

    steps: int = 500
    batch: int = 10
    length: int = 512
    long_batch: int = 2
    long_length: int = 2048
    learning_rate: float = 4e-3
    warmup_steps: int = 30
    weight_decay: float = 0.05
    greedy_share: float = 0.3
    answer_weight: float = 3.0
    text_rows: int = 500
    num_held_out_prompts: int = 48  # per family
    new_tokens: int = 96
    seed: int = 2
    text_weights: dict[str, float] = field(
        default_factory=lambda: {"problems": 0.3, "functions": 0.3, "questions": 0.2, "source": 0.2}
    )
    num_prompts: dict[str, int] = field(
        default_factory=lambda: {
            "problems": 500,
            "functions": 500,
            "questions": 400,
            "source": 200,
            "requests": 800,
            "passages": 280,
        }
    )

    @property
    def step_tokens(self) -> int:
        return (self.batch - self.long_batch) * self.length + self.long_batch * self.long_length

    def row_length(self, family: str) -> int:
        return self.long_length if family == "passages" else self.length


@dataclass(frozen=True)
class RememberedTarget:
    """Rows of tokens, the target's last hidden state at each of them, and its head, which makes the logits from it."""

    ids: Tensor  # [R, T]
    weights: Tensor  # [R, T]
    hidden: Tensor  # [R, T, E]
    head: Tensor  # [V, E]

    def losses(self, model: Callable[..., Any], rows: Tensor, greedy_share: float) -> tuple[Tensor, Tensor]:
        """The weighted sum of the tokens' losses, and of their weights.

        A loss is the cross-entropy between the draft and the target's distribution drawn towards its greedy token.
        """
        with torch.no_grad():
            logits_BTV = nn.functional.linear(self.hidden[rows], self.head)
            greedy_BT1 = logits_BTV.argmax(-1, keepdim=True)
            wanted_BTV = logits_BTV.float().softmax(-1) * (1 - greedy_share)
            wanted_BTV.scatter_add_(-1, greedy_BT1, torch.full_like(wanted_BTV[..., :1], greedy_share))
        given_BTV = model(input_ids=self.ids[rows]).logits.float()
        losses = nn.functional.cross_entropy(given_BTV.flatten(0, 1), wanted_BTV.flatten(0, 1), reduction="none")
        weights = self.weights[rows].flatten()
        return (losses * weights).sum(), weights.sum()


def mean_loss(
    model: Callable[..., Any], rows: Tensor, short: RememberedTarget, long: RememberedTarget, num_long: int, greedy_share: float
) -> Tensor:
    """The weighted mean loss of the tokens of ``rows``: the last ``num_long`` are rows of ``long``, the others of ``short``."""
    sums = [
        memory.losses(model, part, greedy_share)
        for memory, part in ((short, rows[: len(rows) - num_long]), (long, rows[len(rows) - num_long :]))
        if len(part)
    ]
    return torch.stack([loss for loss, _ in sums]).sum() / torch.stack([weight for _, weight in sums]).sum()


@torch.no_grad()
def remember(target: LlamaForCausalLM, ids_RT: Tensor, store: Path) -> Tensor:
    """The last hidden states of the target, computed in bfloat16, for all rows; ``store`` keeps one file per 64 rows.

    Raises:
        UserError: ``store`` holds other rows.
    """
    store.mkdir(parents=True, exist_ok=True)
    hidden: list[Tensor] = []
    for number, ids in enumerate(track(ids_RT.split(_HIDDEN_ROWS), f"hidden states: {store.name}")):
        path = store / f"{number:04}.safetensors"
        if not path.exists():
            states = [target.model(input_ids=part, use_cache=False).last_hidden_state for part in ids.split(16)]
            save_file({"ids": ids.clone(), "hidden": torch.cat(states)}, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
        stored = load_file(path)
        if not torch.equal(stored["ids"], ids):
            raise UserError(f"{path} comes from other text: give another --work, or remove it")
        hidden.append(stored["hidden"])
    return torch.cat(hidden)


def text_rows(documents: list[Document], tokenizer: PreTrainedTokenizerFast, recipe: DraftRecipe) -> Tensor:
    """Rows of training text, each family with its share: int64 [text_rows, length]."""
    characters = recipe.text_rows * recipe.length * _CHARACTERS_PER_TOKEN
    mixed = corpus.mix(documents, recipe.text_weights, characters, recipe.seed)
    return pack(mixed, tokenizer, recipe.length, recipe.seed)[: recipe.text_rows]


@torch.no_grad()
def on_policy_agreement(draft: nn.Module, spoken: dict[str, list[Continuation]]) -> dict[str, dict]:
    """How often the draft's top k holds the next token of the target's greedy continuation, per family."""
    report: dict[str, dict] = {}
    for family, continuations in spoken.items():
        hits = dict.fromkeys((1, 4, 16), 0)
        num_tokens = 0
        for continuation in continuations:
            ids = torch.tensor([continuation.ids])
            first = continuation.prompt_length
            likeliest_T16 = draft(input_ids=ids).logits[0, first - 1 : -1].topk(16).indices
            found_T16 = likeliest_T16 == ids[0, first:, None]
            num_tokens += len(found_T16)
            for k in hits:
                hits[k] += int(found_T16[:, :k].any(-1).sum())
        report[family] = {f"top{k}": round(count / num_tokens, 4) for k, count in hits.items()} | {"tokens": num_tokens}
    return report


@dataclass(frozen=True)
class Yardstick:
    """What a draft is measured on, before and after: the target, held-out rows, and continuations of held-out prompts."""

    target: nn.Module
    rows: dict[str, Tensor]
    spoken: dict[str, list[Continuation]]

    def measure(self, draft_path: Path) -> dict[str, dict]:
        """Loss and agreement of the draft as stored, computed in float32."""
        draft = LlamaForCausalLM.from_pretrained(draft_path, dtype=torch.float32).eval()
        return {
            "held_out": evaluate(self.target, draft, self.rows, "cpu"),
            "on_policy": on_policy_agreement(draft, self.spoken),
        }


def by_family(documents: list[Document], held_out: bool) -> dict[str, list[Document]]:
    """The documents of one split, by family."""
    families: dict[str, list[Document]] = {}
    for document in documents:
        if document.held_out == held_out:
            families.setdefault(document.family, []).append(document)
    return families


def prompts_of(
    family: str,
    families: dict[str, list[Document]],
    tokenizer: PreTrainedTokenizerFast,
    num_prompts: int,
    recipe: DraftRecipe,
) -> list[list[int]]:
    """Token ids of prompts of one family: of its documents, or made of the words of all documents; none if there are none."""
    everything = [document for found in families.values() for document in found]
    if family == "requests":
        return request_prompts(everything, tokenizer, num_prompts, recipe.seed)
    if family == "passages":
        longest = recipe.long_length - recipe.new_tokens
        return passage_prompts(everything, tokenizer, num_prompts, longest, recipe.seed)
    return prompts(families[family], tokenizer, num_prompts, recipe.seed) if family in families else []


def speak(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    families: dict[str, list[Document]],
    num_prompts: dict[str, int],
    recipe: DraftRecipe,
    store: Path,
) -> dict[str, list[Continuation]]:
    """The target's continuations of ``num_prompts`` prompts of each family that there is; ``store`` keeps them."""
    spoken = {}
    for family, count in num_prompts.items():
        if prompt_ids := prompts_of(family, families, tokenizer, count, recipe):
            spoken[family] = continue_greedily(target, prompt_ids, recipe.new_tokens, store / family)
    return spoken


def continue_draft(
    target_path: Path,
    draft_path: Path,
    problems: Path | None,
    out: Path,
    work: Path,
    recipe: DraftRecipe,
    compiled: bool,
    threads: int,
) -> dict:
    """Train a pair's draft further and write it to ``out/draft`` (bfloat16, HF format); returns what was measured.

    Beside it go ``training.json``, which continues the one beside the old draft if there is one, and then a model card.

    Args:
        problems: GSM8K-format JSONL, or None to train on the standard library alone.
        work: where continuations, hidden states, log and checkpoints live; a second run goes on from them.
    """
    torch.set_num_threads(threads)
    documents = [*corpus.library_documents(), *corpus.topic_documents()]
    if problems is not None:
        documents += corpus.word_problem_documents(problems)
    training, held_out = by_family(documents, held_out=False), by_family(documents, held_out=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target_path)
    target = LlamaForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    spoken = speak(target, tokenizer, training, recipe.num_prompts, recipe, work / "continuations")
    held_out_prompts = dict.fromkeys(recipe.num_prompts, recipe.num_held_out_prompts)
    yardstick = Yardstick(
        target,
        {
            family: pack(iter(found), tokenizer, recipe.length, recipe.seed)[:32]
            for family, found in held_out.items()
            if family in recipe.text_weights
        },
        speak(target, tokenizer, held_out, held_out_prompts, recipe, work / "held-out"),
    )
    before = yardstick.measure(draft_path)

    text = text_rows([document for found in training.values() for document in found], tokenizer, recipe)
    rows = {"text": Rows(text, torch.zeros_like(text, dtype=torch.bool))}
    packed = {family: pack_whole(found, recipe.row_length(family), recipe.seed) for family, found in spoken.items()}
    rows |= {family: found for family, found in packed.items() if len(found.ids)}
    draft = train_draft(target_path, draft_path, rows, work, recipe, compiled)
    draft.to(torch.bfloat16).save_pretrained(out / "draft")
    tokenizer.save_pretrained(out / "draft")
    return _report(draft_path.parent, out, recipe, rows, before, yardstick.measure(out / "draft"))


def train_draft(
    target_path: Path, draft_path: Path, rows: dict[str, Rows], work: Path, recipe: DraftRecipe, compiled: bool
) -> LlamaForCausalLM:
    """The draft after ``recipe.steps`` steps over all rows, which are shuffled again for each pass.

    Raises:
        UserError: a step has long rows, but there are none.
    """
    target = LlamaForCausalLM.from_pretrained(target_path, dtype=torch.bfloat16).eval()
    head = target.lm_head.weight.detach().clone()
    memories = []
    for length in (recipe.length, recipe.long_length):
        names = [name for name in rows if recipe.row_length(name) == length]
        hidden = [remember(target, rows[name].ids, work / "hidden" / name) for name in names]
        if not names:
            raise UserError(f"no row of {length} tokens: give --problems, or a recipe with more prompts")
        ids, own = (torch.cat([getattr(rows[name], part) for name in names]) for part in ("ids", "before_own"))
        memories.append(RememberedTarget(ids, 1 + own * (recipe.answer_weight - 1), torch.cat(hidden), head))
    short, long = memories
    draft = LlamaForCausalLM.from_pretrained(draft_path, dtype=torch.float32)
    draft.config.use_cache = False
    generator = torch.Generator().manual_seed(recipe.seed)
    counts = (len(short.ids), recipe.batch - recipe.long_batch), (len(long.ids), recipe.long_batch)
    order = torch.cat([_shuffled(num_rows, recipe.steps, batch, generator) for num_rows, batch in counts], 1).flatten()
    loss = partial(mean_loss, short=short, long=long, num_long=recipe.long_batch, greedy_share=recipe.greedy_share)
    phases = ((draft.config.num_hidden_layers, recipe.steps),)
    draft = Trainer("continued", recipe, work, "cpu", compiled).run(draft, phases, order, loss)
    draft.config.use_cache = draft.generation_config.use_cache = True
    return draft


def _shuffled(num_rows: int, steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """``batch`` rows for each step, every row once before any comes again: int64 [steps, batch]."""
    passes = math.ceil(steps * batch / num_rows)
    order = torch.cat([torch.randperm(num_rows, generator=generator) for _ in range(passes)])
    return order[: steps * batch].view(steps, batch)


def _report(pair: Path, out: Path, recipe: DraftRecipe, rows: dict[str, Rows], before: dict, after: dict) -> dict:
    """Write ``training.json`` and, where it is known how ``pair`` was made, the model card."""
    earlier = pair / "training.json"
    report = json.loads(earlier.read_text()) if earlier.is_file() else {}
    continuation = {
        "recipe": asdict(recipe),
        "row_tokens": {name: found.ids.numel() for name, found in rows.items()},
        "seen_tokens": recipe.steps * recipe.step_tokens,
        "before": before,
    }
    report |= {**after, "continuations": [*report.get("continuations", []), continuation]}
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    if "recipe" in report:
        (out / "README.md").write_text(model_card(report))
    return report
