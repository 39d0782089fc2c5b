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
from pipedec.train.continuations import Continuation, continue_greedily, pack_whole, prompts
from pipedec.train.corpus import Document
from pipedec.train.model_card import model_card
from pipedec.train.reference import evaluate, pack
from pipedec.train.trainer import Trainer

_HIDDEN_ROWS = 64  # per file
_CHARACTERS_PER_TOKEN = 4  # rather more than there are


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that decides the result; a step is ``batch`` rows of ``length`` tokens.

    The draft learns (1 − ``greedy_share``) of the target's distribution and ``greedy_share`` of its likeliest token.
    """

    steps: int = 1400
    batch: int = 16
    length: int = 512
    learning_rate: float = 4e-3
    warmup_steps: int = 30
    weight_decay: float = 0.05
    greedy_share: float = 0.3
    text_rows: int = 1500
    num_held_out_prompts: int = 48  # per family
    new_tokens: int = 96
    seed: int = 1
    text_weights: dict[str, float] = field(
        default_factory=lambda: {"problems": 0.3, "functions": 0.3, "questions": 0.2, "source": 0.2}
    )
    num_prompts: dict[str, int] = field(
        default_factory=lambda: {"problems": 1750, "functions": 1056, "questions": 480, "source": 480}
    )


@dataclass(frozen=True)
class RememberedTarget:
    """Rows of tokens, the target's last hidden state at each of them, and its head, which makes the logits from it."""

    ids: Tensor  # [R, T]
    hidden: Tensor  # [R, T, E]
    head: Tensor  # [V, E]

    def loss(self, model: Callable[..., Any], rows: Tensor, greedy_share: float) -> Tensor:
        """Cross-entropy, per token, between the draft and the target's distribution drawn towards its greedy token."""
        with torch.no_grad():
            logits_BTV = nn.functional.linear(self.hidden[rows], self.head)
            greedy_BT1 = logits_BTV.argmax(-1, keepdim=True)
            wanted_BTV = logits_BTV.float().softmax(-1) * (1 - greedy_share)
            wanted_BTV.scatter_add_(-1, greedy_BT1, torch.full_like(wanted_BTV[..., :1], greedy_share))
        given_BTV = model(input_ids=self.ids[rows]).logits.float()
        return nn.functional.cross_entropy(given_BTV.flatten(0, 1), wanted_BTV.flatten(0, 1))


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
        if family in families:
            prompt_ids = prompts(families[family], tokenizer, count, recipe.seed)
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
    documents = list(corpus.library_documents())
    if problems is not None:
        documents += corpus.word_problem_documents(problems)
    training, held_out = by_family(documents, held_out=False), by_family(documents, held_out=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target_path)
    target = LlamaForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    spoken = speak(target, tokenizer, training, recipe.num_prompts, recipe, work / "continuations")
    held_out_prompts = dict.fromkeys(recipe.num_prompts, recipe.num_held_out_prompts)
    yardstick = Yardstick(
        target,
        {family: pack(iter(found), tokenizer, recipe.length, recipe.seed)[:32] for family, found in held_out.items()},
        speak(target, tokenizer, held_out, held_out_prompts, recipe, work / "held-out"),
    )
    before = yardstick.measure(draft_path)

    rows = {"text": text_rows([document for found in training.values() for document in found], tokenizer, recipe)}
    packed = {family: pack_whole(found, recipe.length, recipe.seed) for family, found in spoken.items()}
    rows |= {family: ids for family, ids in packed.items() if len(ids)}
    draft = train_draft(target_path, draft_path, rows, work, recipe, compiled)
    draft.to(torch.bfloat16).save_pretrained(out / "draft")
    tokenizer.save_pretrained(out / "draft")
    return _report(draft_path.parent, out, recipe, rows, before, yardstick.measure(out / "draft"))


def train_draft(
    target_path: Path, draft_path: Path, rows: dict[str, Tensor], work: Path, recipe: DraftRecipe, compiled: bool
) -> LlamaForCausalLM:
    """The draft after ``recipe.steps`` steps over all rows, which are shuffled again for each pass."""
    target = LlamaForCausalLM.from_pretrained(target_path, dtype=torch.bfloat16).eval()
    hidden_RTE = torch.cat([remember(target, ids, work / "hidden" / name) for name, ids in rows.items()])
    remembered = RememberedTarget(torch.cat(list(rows.values())), hidden_RTE, target.lm_head.weight.detach().clone())
    draft = LlamaForCausalLM.from_pretrained(draft_path, dtype=torch.float32)
    draft.config.use_cache = False
    passes = math.ceil(recipe.steps * recipe.batch / len(hidden_RTE))
    generator = torch.Generator().manual_seed(recipe.seed)
    order = torch.cat([torch.randperm(len(hidden_RTE), generator=generator) for _ in range(passes)])
    loss = partial(remembered.loss, greedy_share=recipe.greedy_share)
    phases = ((draft.config.num_hidden_layers, recipe.steps),)
    draft = Trainer("continued", recipe, work, "cpu", compiled).run(draft, phases, order, loss)
    draft.config.use_cache = draft.generation_config.use_cache = True
    return draft


def _report(pair: Path, out: Path, recipe: DraftRecipe, rows: dict[str, Tensor], before: dict, after: dict) -> dict:
    """Write ``training.json`` and, where it is known how ``pair`` was made, the model card."""
    earlier = pair / "training.json"
    report = json.loads(earlier.read_text()) if earlier.is_file() else {}
    continuation = {
        "recipe": asdict(recipe),
        "row_tokens": {name: ids.numel() for name, ids in rows.items()},
        "seen_tokens": recipe.steps * recipe.batch * recipe.length,
        "before": before,
    }
    report |= {**after, "continuations": [*report.get("continuations", []), continuation]}
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    if "recipe" in report:
        (out / "README.md").write_text(model_card(report))
    return report
