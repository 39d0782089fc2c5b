"""Train the shipped pair: a 24-layer target grown from a shallow one, and a draft distilled from it.

Owns the recipe (tokenizer, growth phases, optimisers, checkpoints, evaluation). A thin, deep LLaMA trains slowly, so
the target starts with few layers and doubles twice: each new layer is a copy whose output projections are zero, so the
function is unchanged at the moment of growth. A killed run resumes from its last checkpoint.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipedec.train import corpus
from pipedec.train.corpus import ASSISTANT, BEGIN, END, USER, Document
from pipedec.train.model_card import model_card

# Reserved from the start, so that the thread dialects never need a new vocabulary.
CONTROL_TOKENS = [
    BEGIN, END, USER, ASSISTANT, "<|system|>", "<|pad|>", "[Fork]", "[Child]",
    "<promise", "<async>", "</async>", "<sync/>", "<Parallel>", "</Parallel>", "<Path>", "</Path>",
    "<Conclusion>", "</Conclusion>", *(f"<|reserved_{number}|>" for number in range(14)),
]  # fmt: skip
CHAT_TEMPLATE = (
    f"{{{{ '{BEGIN}' }}}}{{% for message in messages %}}"
    f"{{% if message.role == 'assistant' %}}{{{{ '{ASSISTANT}' + message.content + '{END}' }}}}"
    f"{{% elif message.role == 'system' %}}{{{{ '<|system|>' + message.content + '{END}' }}}}"
    f"{{% else %}}{{{{ '{USER}' + message.content.strip() + '{END}' }}}}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 2

    def config(self, layers: int, vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048, tie_word_embeddings=True, use_cache=False,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result.

    All phases are (layers, steps); a step is ``batch`` rows of ``length`` tokens, taken in order from ``characters`` of text.
    The draft first learns the text by itself, then the target's distribution.
    """

    vocabulary: int = 4096
    target: Shape = Shape(hidden=192, intermediate=512, heads=6)
    draft: Shape = Shape(hidden=128, intermediate=352, heads=4)
    phases: tuple[tuple[int, int], ...] = ((6, 1600), (12, 800), (24, 280))
    draft_phases: tuple[tuple[int, int], ...] = ((2, 600),)
    distillation_phases: tuple[tuple[int, int], ...] = ((2, 300),)
    characters: int = 86_343_680
    batch: int = 16
    length: int = 512
    learning_rate: float = 7e-3
    warmup_steps: int = 40
    weight_decay: float = 0.05
    seed: int = 0
    weights: dict[str, float] = field(
        default_factory=lambda: {"problems": 0.3, "functions": 0.2, "questions": 0.15, "source": 0.35}
    )


def train_tokenizer(documents: list[Document], recipe: Recipe, out: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, the control tokens first. Saved in ``out`` in HF format."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = corpus.mix(documents, recipe.weights, characters=8_000_000, seed=recipe.seed)
    tokenizer.train_from_iterator((document.text for document in sample), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token="<|pad|>",
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE, model_max_length=2048,
    )  # fmt: skip
    wrapped.save_pretrained(out)
    return wrapped


def pack(documents: Iterator[Document], tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Tensor:
    """Concatenate documents into rows of ``length`` token ids and shuffle the rows: int64 [rows, length]."""
    ids: list[int] = []
    texts = [document.text for document in documents]
    for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
    rows = torch.tensor(ids[: len(ids) // recipe.length * recipe.length]).view(-1, recipe.length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(recipe.seed))]


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Double the depth without changing the function: every layer is followed by a silenced copy of itself."""
    old = model.config.num_hidden_layers
    if layers != 2 * old:
        raise ValueError(f"a phase must double the layers: {old} → {layers}")
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": layers})
    deeper = LlamaForCausalLM(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    for index in range(layers):
        for name, tensor in model.model.layers[index // 2].state_dict().items():
            silent = index % 2 == 1 and ("o_proj" in name or "down_proj" in name)
            state[f"model.layers.{index}.{name}"] = torch.zeros_like(tensor) if silent else tensor
    deeper.load_state_dict(state)
    return deeper


def make_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    rate = recipe.learning_rate
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, steps: int, last_phase: bool, warmup: int) -> float:
    """Warm up, hold; in the last phase fall linearly to a twentieth."""
    factor = min(1.0, (step + 1) / warmup)
    return factor * (1.0 - 0.95 * step / steps) if last_phase else factor


def next_token_loss(model: Callable[..., Any], ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every next token."""
    logits = model(input_ids=ids_BT).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


def distillation_loss(model: Callable[..., Any], teacher: Callable[..., Any], ids_BT: Tensor) -> Tensor:
    """KL divergence from the target's distribution to the draft's, per token."""
    with torch.no_grad():
        wanted = teacher(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    given = model(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    return nn.functional.kl_div(given, wanted, log_target=True, reduction="batchmean")


class Trainer:
    """Runs the phases of one model and keeps a resumable checkpoint in ``work``."""

    def __init__(self, name: str, recipe: Recipe, work: Path, device: str, compile_model: bool) -> None:
        self.name, self.recipe, self.work, self.device, self.compile_model = name, recipe, work, device, compile_model

    def run(
        self, model: LlamaForCausalLM, phases: tuple[tuple[int, int], ...], rows: Tensor, teacher: Callable[..., Any] | None
    ) -> LlamaForCausalLM:
        """Train through ``phases`` and return the last model. Each phase continues in the rows where the last stopped."""
        first_row = 0
        for index, (layers, steps) in enumerate(phases):
            if model.config.num_hidden_layers != layers:
                model = deepen(model, layers)
            model = model.to(self.device)
            used = steps * self.recipe.batch
            phase_rows = rows[torch.arange(first_row, first_row + used) % len(rows)]
            self._phase(model, index, steps, index == len(phases) - 1, phase_rows, teacher)
            first_row += used
        return model

    def _phase(
        self, model: LlamaForCausalLM, index: int, steps: int, last: bool, rows: Tensor, teacher: Callable[..., Any] | None
    ) -> None:
        recipe = self.recipe
        optimizers = make_optimizers(model, recipe)
        start = self._resume(model, optimizers, index)
        if start >= steps:
            return
        forward = torch.compile(model) if self.compile_model else model
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            bar = progress.add_task(f"{self.name} phase {index}", total=steps, completed=start)
            for step in range(start, steps):
                factor = learning_rate_factor(step, steps, last, recipe.warmup_steps)
                ids = rows[step * recipe.batch : (step + 1) * recipe.batch].to(self.device)
                with torch.autocast(self.device, dtype=torch.bfloat16):
                    loss = next_token_loss(forward, ids) if teacher is None else distillation_loss(forward, teacher, ids)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = recipe.learning_rate * factor
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                progress.update(bar, advance=1, description=f"{self.name} phase {index} loss {loss.item():.3f}")
                if (step + 1) % 50 == 0 or step + 1 == steps:
                    self._log(index, step + 1, loss.item())
                    self._save(model, optimizers, index, step + 1)

    def _checkpoint(self, index: int) -> Path:
        return self.work / f"{self.name}-phase{index}.safetensors"

    def _save(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], index: int, step: int) -> None:
        tensors = {f"model.{name}": p.detach().cpu() for name, p in model.named_parameters()}
        for number, optimizer in enumerate(optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"optimizer.{number}.{parameter}.{key}"] = torch.as_tensor(value).cpu().contiguous()
        partial = self._checkpoint(index).with_suffix(".partial")
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial, metadata={"step": str(step)})
        partial.rename(self._checkpoint(index))

    def _resume(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], index: int) -> int:
        """Load the phase's checkpoint if there is one; returns the steps already done."""
        path = self._checkpoint(index)
        if not path.exists():
            return 0
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        for number, optimizer in enumerate(optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, parameter_index, key = name.split(".", 3)
                    states.setdefault(int(parameter_index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        with safe_open(path, "pt") as stored:
            return int(stored.metadata()["step"])

    def _log(self, phase: int, step: int, loss: float) -> None:
        row = {"model": self.name, "phase": phase, "step": step, "loss": round(loss, 4), "time": round(time.time(), 1)}
        with (self.work / "log.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")


@torch.no_grad()
def evaluate(target: nn.Module, draft: nn.Module, rows_by_family: dict[str, Tensor], device: str) -> dict[str, dict]:
    """Held-out loss of both models and how often the draft's top k holds the target's greedy token, per family."""
    report = {}
    for family, rows in rows_by_family.items():
        sums = {"target_loss": 0.0, "draft_loss": 0.0, "top1": 0.0, "top4": 0.0, "top16": 0.0}
        for ids in rows.split(8):
            ids = ids.to(device)
            target_logits, draft_logits = (model(input_ids=ids).logits[:, :-1].float() for model in (target, draft))
            wanted = ids[:, 1:].flatten()
            sums["target_loss"] += nn.functional.cross_entropy(target_logits.flatten(0, 1), wanted).item() * len(ids)
            sums["draft_loss"] += nn.functional.cross_entropy(draft_logits.flatten(0, 1), wanted).item() * len(ids)
            ranks = draft_logits.topk(16).indices == target_logits.argmax(-1, keepdim=True)
            for k in (1, 4, 16):
                sums[f"top{k}"] += ranks[..., :k].any(-1).float().mean().item() * len(ids)
        report[family] = {name: round(value / len(rows), 4) for name, value in sums.items()} | {"tokens": rows.numel()}
    return report


def train(problems: Path | None, out: Path, work: Path, recipe: Recipe, compile_model: bool, threads: int) -> dict:
    """Train the pair into ``out/target`` and ``out/draft`` (bfloat16, HF format); returns what was measured.

    Args:
        problems: GSM8K-format JSONL, or None to train on the standard library alone.
        work: where tokenizer, log and checkpoints live; a second run continues from them.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work.mkdir(parents=True, exist_ok=True)
    documents = list(corpus.library_documents())
    if problems is not None:
        documents += corpus.word_problem_documents(problems)
    training = [document for document in documents if not document.held_out]
    if not (work / "tokenizer.json").exists():
        train_tokenizer(training, recipe, work)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
    target_tokens = sum(steps for _, steps in recipe.phases) * recipe.batch * recipe.length
    rows = pack(corpus.mix(training, recipe.weights, characters=recipe.characters, seed=recipe.seed), tokenizer, recipe)

    vocabulary = len(tokenizer)
    target = LlamaForCausalLM(recipe.target.config(recipe.phases[0][0], vocabulary, tokenizer))
    target = Trainer("target", recipe, work, device, compile_model).run(target, recipe.phases, rows, teacher=None)
    draft = LlamaForCausalLM(recipe.draft.config(recipe.draft_phases[0][0], vocabulary, tokenizer))
    target.eval().requires_grad_(False)
    teacher = torch.compile(target) if compile_model else target
    draft_rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(recipe.seed + 1))]
    draft = Trainer("draft", recipe, work, device, compile_model).run(draft, recipe.draft_phases, draft_rows, teacher=None)
    distilling = Trainer("distilled", recipe, work, device, compile_model)
    draft = distilling.run(draft, recipe.distillation_phases, rows, teacher)

    for name, model in (("target", target), ("draft", draft)):
        model.config.use_cache = True
        model.to(torch.bfloat16).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    # Measure what is shipped: the rounded weights, computed in float32.
    target, draft = (LlamaForCausalLM.from_pretrained(out / name, dtype=torch.float32).to(device) for name in ("target", "draft"))
    held_out = {}
    for family in recipe.weights:
        family_documents = [document for document in documents if document.held_out and document.family == family]
        if family_documents:
            held_out[family] = pack(iter(family_documents), tokenizer, recipe)[:32]
    report = {
        "recipe": asdict(recipe), "training_tokens": target_tokens, "prepared_tokens": rows.numel(),
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "held_out": evaluate(target, draft, held_out, device),
    }  # fmt: skip
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "README.md").write_text(model_card(report))
    return report
