"""Train a draft for a frozen target, on the target's own answers to prompts: a new one, or one that is continued.

Owns the recipe: which rows, how many steps, what is measured and reported. The loss is ``distillation``'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from pipedec.checkpoints import fingerprint
from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.families import model_config
from pipedec.families.llama import LlamaConfig
from pipedec.flags import Help
from pipedec.gguf import write_quantized
from pipedec.model import DraftVocabulary
from pipedec.text.prompt import end_token_ids, load_tokenizer, vocabulary_digest
from pipedec.text.tokenizer import Tokenizer, load_for_training
from pipedec.train.acceptance import measure_acceptance, some_answers
from pipedec.train.continuations import Continuation, Continuations, SplitPrompts, answer
from pipedec.train.distillation import MOST_LIKELY, DistillationRows, TargetMemory, mean_loss, remember
from pipedec.train.measuring import HeldOut, MeasuredDraft, OnText, acceptance
from pipedec.train.replicas import ALONE, Replicas
from pipedec.train.run import CARDS, Run, TrainingLoop, card, linear_decay, muon_and_adamw, warm_up
from pipedec.train.targets import FrozenTarget, LoadedTarget, Model, output_embeddings, read_tensors
from pipedec.verify.reference import load_transformers

HEAD_DIM = 64
SCORED_ANSWERS = 24  # held-out ones of each set, by which the best step is chosen
_STD = 0.02  # standard deviation of new weights
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True)
class DraftShape:
    """The size of a new draft. Raises UserError for a number that is out of range."""

    hidden_size: Annotated[int, Help("Hidden size of a new draft.")] = 320
    layers: Annotated[int, Meta(ge=1), Help("Layers of a new draft.")] = 4
    vocabulary: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Help("Number of tokens that a new draft knows, the most frequent ones of the text that it learns from (default: all)."),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden_size < HEAD_DIM or self.hidden_size % HEAD_DIM:
            raise UserError(f"--hidden-size must be a multiple of {HEAD_DIM}, not {self.hidden_size}")

    def model_config(self, vocab_size: int) -> LlamaConfig:
        """The sizes of a draft for a target with so many tokens."""
        heads, known = self.hidden_size // HEAD_DIM, vocab_size if self.vocabulary is None else self.vocabulary + 1
        return LlamaConfig(
            model_type="llama", hidden_size=self.hidden_size, intermediate_size=-(-self.hidden_size * 8 // 3 // 32) * 32,
            num_hidden_layers=self.layers, num_attention_heads=heads, vocab_size=min(known, vocab_size),
            tie_word_embeddings=True, head_dim=HEAD_DIM,
        )  # fmt: skip


def frequent_tokens(learned: list[Continuation], count: int, tokenizer: Tokenizer, vocab_size: int) -> DraftVocabulary:
    """The ``count`` most frequent tokens of prompts and answers, the most frequent one first."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for found in learned:
        counts += torch.bincount(torch.tensor(found.ids), minlength=vocab_size)
    tokens = counts.sort(descending=True, stable=True).indices[:count]
    return DraftVocabulary.create(tokens, vocab_size, vocabulary_digest(tokenizer))


def new_draft(target: Path, shape: DraftShape, vocabulary: DraftVocabulary | None, seed: int, out: Path) -> Path:
    """Write a draft that has learned nothing yet to ``out``, its vocabulary beside it; returns ``out``."""
    torch.manual_seed(seed)
    of_target = model_config(target)
    (embedding_VE,) = read_tensors(target, of_target.embedding_tensors(), torch.float32)
    embedding_DE = embedding_VE if vocabulary is None else embedding_VE[vocabulary.tokens.clamp(min=0)]
    size = shape.model_config(len(embedding_VE))
    config = AutoConfig.for_model(
        size.model_type, vocab_size=len(embedding_DE), hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers, num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.kv_heads, head_dim=HEAD_DIM,
        max_position_embeddings=of_target.max_position_embeddings, rope_parameters=_ROPE,
        tie_word_embeddings=True, initializer_range=_STD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    draft = LlamaForCausalLM(config)
    # The embeddings, projected to as many main directions as the draft is wide, and scaled to the deviation of new weights.
    centred = embedding_DE - embedding_DE.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # eigenvalues ascend
    found = centred @ vectors[:, -shape.hidden_size :].flip(-1)
    missing = shape.hidden_size - found.shape[1]  # where the draft is wider than its target
    found = torch.nn.functional.pad(found, (0, max(missing, 0)))
    draft.get_input_embeddings().weight.data.copy_(found * (_STD / found.std()))
    draft.generation_config.eos_token_id = list(end_token_ids(target)) or None
    draft.save_pretrained(out)
    if vocabulary is not None:
        vocabulary.save(out)
    return out


# From a model and some rows to the mean loss of their tokens.
Loss = Callable[[Callable[..., Any], Tensor], Tensor]


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that decides the result; a step is ``batch`` rows, ``long_batch`` of which have ``long_length`` tokens.

    Without long rows all rows of a step are short, and the reverse.
    """

    steps: Annotated[int, Meta(ge=1), Help("Training steps.")] = 500
    batch: Annotated[int, Meta(ge=1), Help("Rows of a step.")] = 10
    length: Annotated[int, Meta(ge=1), Help("Tokens of a row.")] = 512
    long_batch: int = 2
    long_length: int = 2048
    learning_rate: Annotated[float, Help("Peak learning rate.")] = 4e-3
    warmup_steps: int = 30
    weight_decay: float = 0.05
    greedy_share: float = 0.3  # weight of the target's most likely token beside its distribution
    answer_weight: float = 3.0  # weight of the loss where the next token was generated by the target; 1 elsewhere
    new_tokens: Annotated[int, Help("Maximum number of tokens of an answer.")] = 96
    seed: Annotated[int, Help("Seed of prompts, new weights and the order of rows.")] = 2
    weights: Annotated[
        Literal["bfloat16", "Q8_0", "Q5_0", "Q4_0"], Help("Format of the trained draft: bfloat16, or GGUF's with 8, 5 or 4 bits.")
    ] = "bfloat16"
    drawn: Annotated[int, Meta(ge=0), Help("Answers to each prompt drawn with temperature 1, beside the greedy one.")] = 0
    long_sets: tuple[str, ...] = ()  # names of the prompt sets whose answers are packed into long rows

    def __post_init__(self) -> None:
        check_fields(self)

    def with_long_sets(self, prompts: dict[str, SplitPrompts]) -> DraftRecipe:
        """This recipe, with long rows for the sets whose longest prompt does not fit a short row with its answer."""
        longest = {name: max(map(len, part.training), default=0) for name, part in prompts.items()}
        return replace(self, long_sets=tuple(name for name, length in longest.items() if length + self.new_tokens > self.length))

    def row_length(self, name: str) -> int:
        """Tokens of a row of this prompt set."""
        return self.long_length if name in self.long_sets else self.length

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then linear decay to a twentieth."""
        return self.learning_rate * (warm_up(step, self.warmup_steps) * linear_decay(step, self.steps))


@dataclass(frozen=True)
class Text:
    """Plain text to learn from beside the answers."""

    rows: Tensor  # int64 [R, length]
    measured: OnText  # on text that is held out
    description: dict[str, Any] = field(default_factory=dict)  # what ``training.json`` reports of it


def train_draft(
    target_path: Path, start: Path | DraftShape, prompts: dict[str, SplitPrompts], recipe: DraftRecipe, run: Run,
    text: Text | None = None, compiled: bool = True, target: FrozenTarget | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a draft and write it to ``run.out/draft`` as ``recipe.weights`` says; returns what was measured.

    Beside it goes ``training.json``, which continues the one beside the old draft if there is one; with its weights
    ``acceptance.json`` (see ``measure_acceptance``). A draft with a vocabulary of its own has no tokenizer files.

    Several processes share the work; the first one measures and writes, and returns the contents of ``training.json``.

    Args:
        start: the directory of a draft to continue, or the size of a new one.
        compiled: use torch.compile, which needs a C++ compiler.
        target: the same as at ``target_path``, of which only embeddings are read then; None to load it in this process.

    Raises UserError if ``run.work`` belongs to another run, or the answers fill no row; RankLost if another process of this
    training has ended.
    """
    torch.set_num_threads(run.threads)
    target = target or LoadedTarget.of(target_path, run)
    answered = answer(target, prompts, recipe.new_tokens, run.work, run.replicas, recipe.drawn)
    decoded = some_answers(target, prompts, recipe.new_tokens, run)
    draft_path = start if isinstance(start, Path) else _begin(target_path, start, answered, recipe.seed, run)
    rows = {} if text is None else {"text": Rows(text.rows, torch.zeros_like(text.rows, dtype=torch.bool))}
    for name, found in answered.training.items():
        length = recipe.row_length(name)
        packed = pack_whole([one for one in found if len(one.ids) <= length], length, recipe.seed)
        if len(packed.ids):
            rows[name] = packed
    few = {name: found[:SCORED_ANSWERS] for name, found in answered.held_out.items()}
    draft, seen_tokens = learn(target_path, target, draft_path, rows, few, recipe, run, compiled)
    if not run.replicas.is_first:
        return {}
    out = run.out / "draft"
    _save(draft, out, recipe.weights)
    vocabulary = DraftVocabulary.load(draft_path)
    if vocabulary is not None:
        vocabulary.save(out)
    else:
        load_for_training(target_path).save_pretrained(out)
    continuation = {
        "recipe": asdict(recipe) | (text.description if text is not None else {}),
        "new": None if isinstance(start, Path) else asdict(start),
        "parameters": draft.num_parameters(),
        "prompts": {name: len(part.training) for name, part in prompts.items()},
        "row_tokens": {name: found.ids.numel() for name, found in rows.items()},
        "seen_tokens": seen_tokens,
    }
    held_out = HeldOut(
        model_config(target_path).vocab_size, answered.held_out, None if text is None else text.measured, run.device
    )
    report = _report(draft_path, target_path, out, continuation, held_out)
    measure_acceptance(target_path, out, decoded, out)
    run.write_report(report, card(CARDS / "draft.md.jinja", report))
    return report


def _save(draft: Model, out: Path, weights: str) -> None:
    """Write the draft: in bfloat16 as a Hugging Face checkpoint, else with its weights in a GGUF format."""
    if weights == "bfloat16":
        draft.to(torch.bfloat16).save_pretrained(out)
        return
    out.mkdir(parents=True, exist_ok=True)
    draft.config.save_pretrained(out)
    draft.generation_config.save_pretrained(out)
    write_quantized(out, {name: value.detach().cpu().numpy() for name, value in draft.named_parameters()}, weights)


def _report(old: Path, target: Path, new: Path, continuation: dict[str, Any], held_out: HeldOut) -> dict[str, Any]:
    """The contents of ``training.json``, which continue those beside the old draft: if it was that of another target, only its
    continuations.
    """
    earlier, now = old.parent / "training.json", fingerprint(target)
    report = json.loads(earlier.read_text()) if earlier.is_file() else {}
    if report.get("target_fingerprint") != now:
        report = {"continuations": report.get("continuations", [])}
    report |= {"target": target.name, "target_fingerprint": now, **held_out.measure(new)}
    continuations = [*report.get("continuations", []), continuation | {"before": held_out.measure(old)}]
    return report | {"continuations": continuations}


def _begin(target: Path, shape: DraftShape, answered: Continuations, seed: int, run: Run) -> Path:
    """A new draft in ``run.work``, the same whenever it is made."""
    learned = [found for part in answered.training.values() for found in part]
    tokenizer, size = load_tokenizer(target), model_config(target).vocab_size
    vocabulary = None if shape.vocabulary is None else frequent_tokens(learned, shape.vocabulary, tokenizer, size)
    path = run.work / "new" / "draft"
    if run.replicas.is_first:
        new_draft(target, shape, vocabulary, seed, path)
    run.replicas.wait()
    return path


def learn(
    target_path: Path, target: FrozenTarget, draft_path: Path, rows: dict[str, Rows], held_out: dict[str, list[Continuation]],
    recipe: DraftRecipe, run: Run, compiled: bool,
) -> tuple[Model, int]:  # fmt: skip
    """The draft after ``recipe.steps`` steps over all rows, which are shuffled again for each pass, or after as many as give the
    highest ``acceptance`` of held-out answers; and the tokens of all steps. Raises UserError if there are no rows.
    """
    if not rows:
        raise UserError(f"nothing to learn from: the answers fill no row of {recipe.length} tokens: give more prompts")
    draft = load_transformers(draft_path, torch.float32, run.device)
    vocabulary = DraftVocabulary.between(draft_path, draft.config.vocab_size, model_config(target_path).vocab_size, run.device)
    memory = partial(remember, target, output_embeddings(target_path, run.device), replicas=run.replicas)
    short, long = (_lesson(memory, rows, length, recipe, run, vocabulary) for length in (recipe.length, recipe.long_length))
    num_long = 0 if not len(long.ids) else recipe.long_batch if len(short.ids) else recipe.batch
    counts = (len(short.ids), recipe.batch - num_long), (len(long.ids), num_long)
    generator = torch.Generator().manual_seed(recipe.seed)
    order = torch.cat([_shuffled(num_rows, recipe.steps, batch, generator) for num_rows, batch in counts], 1)
    draft.config.use_cache = False
    shares: dict[str, Any] = {"greedy_share": recipe.greedy_share, "replicas": run.replicas}
    loss = partial(mean_loss, short=short, long=long, num_long=num_long, **shares)
    optimizers = muon_and_adamw(draft, recipe.learning_rate, recipe.weight_decay)
    digest = hashlib.sha256(short.ids.numpy().tobytes() + long.ids.numpy().tobytes()).hexdigest()[:16]
    names = {"target": fingerprint(target_path), "draft": fingerprint(draft_path), "rows": digest}
    identity = asdict(replace(recipe, weights="bfloat16")) | names  # their format does not matter to it
    loop = TrainingLoop("draft", draft, optimizers, run.work, identity, replicas=run.replicas)
    steps = row_steps(draft, order, loss, run.device.type, compiled, run.replicas)
    loop.run(recipe.steps, recipe.rate, steps, partial(acceptance, MeasuredDraft(draft, vocabulary), held_out, str(run.device)))
    draft.config.use_cache = draft.generation_config.use_cache = True
    step_tokens = (recipe.batch - num_long) * recipe.length + num_long * recipe.long_length
    return draft, recipe.steps * step_tokens


def row_steps(
    model: Model, rows: Tensor, loss_of: Loss, device: str = "cpu", compiled: bool = False, replicas: Replicas = ALONE
) -> Callable[[int], dict[str, float]]:
    """Steps on rows, ``rows[step]`` in each, computed in bfloat16: each leaves the gradients of the mean loss in the model.

    ``loss_of`` is the mean loss, or this process's part of it; those of all ``replicas`` add up.
    """
    compute_loss = torch.compile(loss_of) if compiled else loss_of

    def backward(step: int) -> dict[str, float]:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compute_loss(model, rows[step].to(device))
        loss.backward()
        replicas.sum_gradients(model.parameters())
        return {"loss": replicas.sum_of(loss)}

    return backward


def _lesson(
    memory: Callable[[Tensor, Path], TargetMemory], rows: dict[str, Rows], length: int, recipe: DraftRecipe, run: Run,
    vocabulary: DraftVocabulary | None,
) -> DistillationRows:  # fmt: skip
    """All rows of one length, with the target's predictions at their tokens, which ``memory`` keeps in a directory."""
    found = {name: part for name, part in rows.items() if recipe.row_length(name) == length}
    if not found:
        nothing = torch.empty(0, length, MOST_LIKELY)
        return DistillationRows(nothing[..., 0].long(), nothing[..., 0], TargetMemory(nothing.int(), nothing.half()), vocabulary)
    store = run.work / "predictions"
    remembered = TargetMemory.joined([memory(part.ids, store / name) for name, part in found.items()])
    ids, own = (torch.cat([getattr(part, key) for part in found.values()]) for key in ("ids", "before_own"))
    return DistillationRows(ids, 1 + own * (recipe.answer_weight - 1), remembered, vocabulary)


def _shuffled(num_rows: int, steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """``batch`` rows for each step, every row once before any comes again: int64 [steps, batch]."""
    passes = math.ceil(steps * batch / max(num_rows, 1))
    order = [torch.randperm(num_rows, generator=generator) for _ in range(passes)] or [torch.empty(0, dtype=torch.int64)]
    return torch.cat(order)[: steps * batch].view(steps, batch)


@dataclass(frozen=True)
class Rows:
    """Packed token ids, and which of them are followed by a token that the target generated: int64 and bool, [rows, length]."""

    ids: Tensor
    before_own: Tensor


def pack_whole(continuations: list[Continuation], length: int, seed: int) -> Rows:
    """Rows of ``length`` tokens that begin with a prompt.

    A continuation that a row's end cuts off comes again, whole, at the start of the next row; none may be longer than a row.
    """
    rows: list[list[tuple[int, bool]]] = []
    row: list[tuple[int, bool]] = []
    for continuation in random.Random(seed).sample(continuations, len(continuations)):
        last = len(continuation.ids) - 1
        sequence = [(token, continuation.prompt_length - 1 <= place < last) for place, token in enumerate(continuation.ids)]
        row = row + sequence
        if len(row) >= length:
            rows.append(row[:length])
            row = sequence if len(row) > length else []
    packed = torch.tensor(rows, dtype=torch.int64).view(-1, length, 2)
    return Rows(packed[..., 0].contiguous(), packed[..., 1].bool())
