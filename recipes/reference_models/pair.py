"""Train the shipped pair: a 24-layer target grown from a shallow one, and a draft distilled from it.

Owns the recipe: tokenizer, sizes, phases, data. A thin, deep LLaMA trains slowly, so the target starts with few layers, which
are doubled twice: each new layer is a copy whose output projections are zero, so growth does not change the function. A mixture
of experts begins as the grown target. A killed run continues from its last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pipedec.checkpoints import fingerprint
from pipedec.train.draft import Loss, row_steps
from pipedec.train.measuring import TOP_K, MeasuredDraft
from pipedec.train.run import Run, TrainingLoop, card, linear_decay, muon_and_adamw, replacing, warm_up
from recipes.reference_models import corpus
from recipes.reference_models.corpus import ASSISTANT, BEGIN, END, USER, Document

CARD = Path(__file__).with_name("pair.md.jinja")
HELD_OUT_ROWS = 32  # of each family
Phases = tuple[tuple[int, int], ...]  # (layers, steps) of each

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
class ModelSizes:
    """The sizes of a LLaMA model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 2

    def model(self, layers: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
        """A new model."""
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=self.hidden, intermediate_size=self.intermediate,
                num_hidden_layers=layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
                max_position_embeddings=2048, tie_word_embeddings=True, use_cache=False,
                bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts that begins as a dense model, and what balances its experts."""

    experts: int = 16
    active_experts: int = 2
    balance: float = 0.01  # weight of each layer's load-balancing loss
    router_std: float = 0.02
    router_noise: float = 0.03  # by how much of it the experts of one MLP differ

    def model(self, dense: LlamaForCausalLM) -> MixtralForCausalLM:
        """A Mixtral that computes nearly what ``dense`` computes (upcycling into fine-grained experts, He et al. 2024).

        The neurons of each MLP take turns in ``active_experts`` parts. The routers' rows, which are random, are almost equal for
        the experts of as many consecutive ones as there are parts, one of each part, so a token is routed to a whole MLP.
        """
        parts, stated = self.active_experts, dense.config
        model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=stated.vocab_size, hidden_size=stated.hidden_size, intermediate_size=stated.intermediate_size // parts,
                num_hidden_layers=stated.num_hidden_layers, num_attention_heads=stated.num_attention_heads,
                num_key_value_heads=stated.num_key_value_heads, max_position_embeddings=stated.max_position_embeddings,
                rms_norm_eps=stated.rms_norm_eps, rope_parameters=stated.rope_parameters,
                tie_word_embeddings=stated.tie_word_embeddings, use_cache=False,
                bos_token_id=stated.bos_token_id, eos_token_id=stated.eos_token_id, pad_token_id=stated.pad_token_id,
                num_local_experts=self.experts, num_experts_per_tok=parts, router_aux_loss_coef=self.balance,
            )
        )  # fmt: skip
        state = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
        for index, layer in enumerate(dense.model.layers):
            mlp, name = layer.mlp, f"model.layers.{index}.mlp"
            chosen = [slice(expert % parts, None, parts) for expert in range(self.experts)]
            gate_up = [torch.cat([mlp.gate_proj.weight[own], mlp.up_proj.weight[own]]) for own in chosen]
            state[f"{name}.experts.gate_up_proj"] = torch.stack(gate_up)
            state[f"{name}.experts.down_proj"] = torch.stack([parts * mlp.down_proj.weight[:, own] for own in chosen])
            rows = torch.randn(self.experts // parts, dense.config.hidden_size).repeat_interleave(parts, 0)
            state[f"{name}.gate.weight"] = self.router_std * (rows + self.router_noise * torch.randn_like(rows))
        model.load_state_dict(state)
        return model

    def loss(self, model: Callable[..., Any], ids_BT: Tensor) -> Tensor:
        """Cross-entropy and the load-balancing losses (Fedus et al. 2022, §2.2) of the layers, of each by itself: transformers'
        own sum over all layers is also small where an expert has all tokens of one layer and none of another.
        """
        output = model(input_ids=ids_BT, output_router_logits=True)
        losses = [load_balancing_loss_func((logits,), self.experts, self.active_experts) for logits in output.router_logits]
        return cross_entropy(output, ids_BT) + self.balance * torch.stack(losses).sum()


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result.

    All phases are (layers, steps); a step is ``batch`` rows of ``length`` tokens, taken in order from ``characters`` of text.
    The tokenizer is trained on ``tokenizer_characters`` of it. The draft first learns the text, then the target's distribution.
    """

    vocabulary: int = 4096
    target: ModelSizes = ModelSizes(hidden=192, intermediate=512, heads=6)
    draft: ModelSizes = ModelSizes(hidden=128, intermediate=352, heads=4)
    phases: Phases = ((6, 1600), (12, 800), (24, 280))
    draft_phases: Phases = ((2, 600),)
    distillation_phases: Phases = ((2, 300),)
    characters: int = 86_343_680
    tokenizer_characters: int = 8_000_000
    batch: int = 16
    length: int = 512
    learning_rate: float = 7e-3
    warmup_steps: int = 40
    weight_decay: float = 0.05
    seed: int = 0
    weights: dict[str, float] = field(
        default_factory=lambda: {"problems": 0.3, "functions": 0.2, "questions": 0.15, "source": 0.35}
    )

    def scaled(self, factor: float) -> Self:
        """With ``factor`` as many steps in every phase, at least one."""
        scaled: dict[str, Any] = {
            name: tuple((layers, max(1, round(steps * factor))) for layers, steps in getattr(self, name))
            for name in ("phases", "draft_phases", "distillation_phases")
        }
        return replace(self, **scaled)


@dataclass(frozen=True)
class MixtureRecipe(Recipe):
    """The recipe of a mixture that begins as the pair's target, with the text of that target."""

    phases: Phases = ((24, 900),)
    batch: int = 8
    learning_rate: float = 3e-3
    mixture: Mixture = Mixture()


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
    sample = corpus.mix(documents, recipe.weights, characters=recipe.tokenizer_characters, seed=recipe.seed)
    tokenizer.train_from_iterator((document.text for document in sample), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token="<|pad|>",
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE, model_max_length=2048,
    )  # fmt: skip
    wrapped.save_pretrained(out)
    return wrapped


def pack(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> Tensor:
    """Concatenate documents into rows of ``length`` token ids and shuffle the rows: int64 [rows, length]."""
    texts = [document.text for document in documents]
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [token for encoding in encoded for token in encoding.ids]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def train_pair(problems: Path | None, recipe: Recipe, run: Run, compiled: bool) -> dict[str, Any]:
    """Train the pair into ``run.out/target`` and ``run.out/draft`` (bfloat16, HF format); returns what was measured.

    Without ``problems`` (GSM8K-format JSONL) it is trained on the standard library alone; ``compiled`` needs a C++ compiler.
    """
    documents = pair_documents(problems)
    run.work.mkdir(parents=True, exist_ok=True)
    if not (run.work / "tokenizer.json").exists():
        train_tokenizer([document for document in documents if not document.held_out], recipe, run.work)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.work)
    trainer = prepared(documents, tokenizer, recipe, run, compiled)
    rows = trainer.rows
    target = recipe.target.model(recipe.phases[0][0], tokenizer)
    target = trainer.run("target", target, recipe.phases, rows, next_token_loss)
    draft = recipe.draft.model(recipe.draft_phases[0][0], tokenizer)
    target.eval().requires_grad_(False)
    draft_rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(recipe.seed + 1))]
    draft = trainer.run("draft", draft, recipe.draft_phases, draft_rows, next_token_loss)
    draft = trainer.run("distilled", draft, recipe.distillation_phases, rows, partial(distillation_loss, teacher=target))
    for name, model in (("target", target), ("draft", draft)):
        save(model, tokenizer, run.out / name)
    report = pair_report(documents, tokenizer, trainer, run.out / "target", run.out / "draft")
    run.write_report(report, card(CARD, report))
    return report


def train_mixture(problems: Path | None, pair: Path, recipe: MixtureRecipe, run: Run, compiled: bool) -> dict[str, Any]:
    """Train a mixture that begins as the target of ``pair`` into ``run.out/target``; returns what was measured of it and the
    pair's draft, in ``run.out/training.json``, too.
    """
    documents, tokenizer = pair_documents(problems), PreTrainedTokenizerFast.from_pretrained(pair / "target")
    trainer = prepared(documents, tokenizer, recipe, run, compiled)
    target = recipe.mixture.model(LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32))
    target = trainer.run("target", target, recipe.phases, trainer.rows, recipe.mixture.loss)
    save(target, tokenizer, run.out / "target")
    report = pair_report(documents, tokenizer, trainer, run.out / "target", pair / "draft")
    with replacing(run.out / "training.json") as unfinished:
        unfinished.write_text(json.dumps(report, indent=2) + "\n")
    return report


def pair_documents(problems: Path | None) -> list[Document]:
    """The standard library and, if given, word problems."""
    documents = list(corpus.library_documents())
    return documents + list(corpus.word_problem_documents(problems)) if problems is not None else documents


def prepared(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, recipe: Recipe, run: Run, compiled: bool
) -> GrowingTrainer:
    """A trainer with the rows of all phases; random numbers begin anew."""
    torch.set_num_threads(run.threads)
    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = [document for document in documents if not document.held_out]
    mixed = corpus.mix(training, recipe.weights, characters=recipe.characters, seed=recipe.seed)
    return GrowingTrainer(recipe, pack(mixed, tokenizer, recipe.length, recipe.seed), run.work, device, compiled)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model (bfloat16, HF format) that answers greedily unless asked otherwise: a small one babbles at temperature 1."""
    model.generation_config.do_sample = False
    model.config.use_cache = model.generation_config.use_cache = True
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def pair_report(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, trainer: GrowingTrainer, target_path: Path, draft_path: Path
) -> dict[str, Any]:
    """The recipe, and both models as they are stored, in rounded weights, computed in float32."""
    recipe = trainer.recipe
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(trainer.device) for path in (target_path, draft_path)
    )
    held_out = {}
    for family in recipe.weights:
        if kept := [document for document in documents if document.held_out and document.family == family]:
            held_out[family] = pack(kept, tokenizer, recipe.length, recipe.seed)[:HELD_OUT_ROWS]
    return {
        "recipe": asdict(recipe),
        "target_fingerprint": fingerprint(target_path),
        "training_tokens": sum(steps for _, steps in recipe.phases) * recipe.batch * recipe.length,
        "prepared_tokens": trainer.rows.numel(),
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "held_out": text_agreement(target, MeasuredDraft(draft), held_out),
    }


@torch.no_grad()
def text_agreement(target: Any, draft: MeasuredDraft, rows_by_family: dict[str, Tensor]) -> dict[str, dict]:
    """Loss of both models on rows of text, and how often the draft's top k holds the target's greedy token, by family."""
    report = {}
    for family, rows in rows_by_family.items():
        if not len(rows):
            continue
        sums = {"target_loss": 0.0, "draft_loss": 0.0} | {f"top{k}": 0.0 for k in TOP_K}
        for ids in rows.split(8):
            ids = ids.to(target.device)
            target_logits, draft_logits = target(input_ids=ids).logits[:, :-1].float(), draft.logits(ids)[:, :-1]
            next_ids = ids[:, 1:]
            sums["target_loss"] += nn.functional.cross_entropy(target_logits.mT, next_ids).item() * len(ids)
            sums["draft_loss"] += nn.functional.cross_entropy(draft_logits.mT, draft.ids(next_ids)).item() * len(ids)
            ranks = draft.top_ranks(draft_logits, target_logits.argmax(-1))
            for k in TOP_K:
                sums[f"top{k}"] += (ranks < k).float().mean().item() * len(ids)
        report[family] = {name: round(value / len(rows), 4) for name, value in sums.items()} | {"tokens": rows.numel()}
    return report


@dataclass(frozen=True)
class GrowingTrainer:
    """Runs the phases of a model; each keeps a checkpoint in ``work``, from which a killed run continues."""

    recipe: Recipe
    rows: Tensor  # int64 [R, length], the text
    work: Path
    device: str
    compiled: bool  # use torch.compile

    def run(self, name: str, model: PreTrainedModel, phases: Phases, rows: Tensor, loss_of: Loss) -> PreTrainedModel:
        """Train through ``phases`` and return the last model. Each phase continues in the rows where the last one stopped."""
        recipe, first_row = self.recipe, 0
        for index, (layers, steps) in enumerate(phases):
            if model.config.num_hidden_layers != layers:
                model = deepen(model, layers)
            model = model.to(self.device)
            used = steps * recipe.batch
            phase_rows = rows[torch.arange(first_row, first_row + used) % len(rows)].view(steps, recipe.batch, -1)
            optimizers = muon_and_adamw(model, recipe.learning_rate, recipe.weight_decay)
            loop = TrainingLoop(f"{name}-phase{index}", model, optimizers, self.work, asdict(recipe))
            rate = partial(self._rate, steps=steps, is_last=index == len(phases) - 1)
            loop.run(steps, rate, row_steps(model, phase_rows, loss_of, self.device, self.compiled))
            first_row += used
        return model

    def _rate(self, step: int, steps: int, is_last: bool) -> float:
        """Linear warm-up in every phase, linear decay to a twentieth in the last one."""
        factor = warm_up(step, self.recipe.warmup_steps)
        rate: float = self.recipe.learning_rate * (factor * linear_decay(step, steps) if is_last else factor)
        return rate


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Double the depth without changing the function: every layer is followed by a copy whose output projections are zero."""
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


def next_token_loss(model: Callable[..., Any], ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every next token."""
    return cross_entropy(model(input_ids=ids_BT), ids_BT)


def cross_entropy(output: Any, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every next token, of a model's output for ``ids_BT``."""
    logits = output.logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


def distillation_loss(model: Callable[..., Any], ids_BT: Tensor, teacher: Callable[..., Any]) -> Tensor:
    """KL divergence from the teacher's distribution to the model's, per token."""
    with torch.no_grad():
        teacher_log_probs = teacher(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    log_probs = model(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    return nn.functional.kl_div(log_probs, teacher_log_probs, log_target=True, reduction="batchmean")
