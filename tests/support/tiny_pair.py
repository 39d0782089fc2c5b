"""A tiny target, draft and BiTA with a real tokenizer, as every test of whole pipelines needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pipedec.config import Settings
from pipedec.engine.build import resolve
from pipedec.plan.spec import PipelineSpec
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny_llama

TARGET_LAYERS, DRAFT_LAYERS = 8, 2
CONTEXT = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = [
    "The pipeline is kept full: at every timestep each stage works on a different part of the tree.",
    "Natalia sold 12 clips in April, and then half as many in May. How many clips did she sell?",
    "Größe, naïve café, Ελλάδα, 東京 and \U0001f680 need more than one byte for a character.",
]


@dataclass(frozen=True)
class Pair:
    """A target of 8 layers, a draft of 2 with its tokenizer, and a BiTA; ``foreign_draft`` has another tokenizer."""

    target: Path
    draft: Path
    foreign_draft: Path
    bita: Path

    def spec(self, stages: int = 2, groups: int | None = None, draft: str | None = None) -> PipelineSpec:
        """The same on every processor, where the draft computes in float32, too, and whatever ran before."""
        models = {"target": self.target, "draft": draft or self.draft, "bita": self.bita}
        return resolve(Settings.of(**models, stages=stages, groups=groups, draft_dtype="float32", device="cpu", priors=False))

    @property
    def flags(self) -> list[str]:
        return ["--target", str(self.target), "--draft", str(self.draft), "--device", "cpu"]


def make_pair(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, rows: int | None = None, draft_rows: int | None = None
) -> Pair:
    """Save everything under ``folder``, with as many embeddings as the tokenizer has tokens unless ``rows`` say otherwise."""
    made = Pair(folder / "target", folder / "draft", folder / "foreign", folder / "bita")
    tokenizer = tokenizer or tiny_tokenizer()
    vocab = rows or len(tokenizer)
    target = save_tiny_llama(made.target, layers=TARGET_LAYERS, vocab=vocab, max_position_embeddings=CONTEXT)
    save_random_bita(made.bita, made.target)
    # The draft is the target without its last layers, so that it is sometimes right.
    target.model.layers = torch.nn.ModuleList(target.model.layers[:DRAFT_LAYERS])
    target.config.num_hidden_layers = DRAFT_LAYERS
    if draft_rows is not None:
        target.resize_token_embeddings(draft_rows, mean_resizing=False)
    target.save_pretrained(made.draft)
    save_tiny_llama(made.foreign_draft, layers=DRAFT_LAYERS, vocab=300, max_position_embeddings=CONTEXT)
    for directory in (made.target, made.draft):
        tokenizer.save_pretrained(directory)
    foreign_tokenizer().save_pretrained(made.foreign_draft)
    return made


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """The target's and the draft's tokenizer, of 300 tokens."""
    return _train_tokenizer(SENTENCES, vocab_size=300)


def foreign_tokenizer() -> PreTrainedTokenizerBase:
    """Another tokenizer with as many tokens."""
    return _train_tokenizer(["Entirely other words make entirely other merges, whatever the vocabulary."], vocab_size=300)


def _train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with the usual control tokens (``<s>`` 1, ``</s>`` 2) and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
