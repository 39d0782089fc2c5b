"""Tiny random models that answer in several decode threads: control tokens and tags are likely, all else is left to chance.

Two things make them so: a bias on a few letters and on the tokens of a dialect, and for PASTA's tags weights that have learned
which token of a promise follows which. What an answer says still depends on its whole context.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from msgspec import structs
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel

from pipedec.core.sampling import SamplingParams
from pipedec.directories import reference_pair
from pipedec.plan.spec import PipelineSpec
from pipedec.threads import BoundDialect, Dialect, Sequence, ThreadedSequence, bind, load_dialect
from pipedec.verify.reference import Choose, naive_threads, with_fewest_tokens
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny_llama
from support.specs import bare_spec

MAX_TOKENS = {4: 80, 14: 40}  # by the target's number of layers
DEPTHS = tuple(MAX_TOKENS)
END = 1
PROMPTS = ("Tell me a story.", "What does shutil.copytree() do?")
LETTERS = "abcdefghijkl"
PROMISE = (("<promise",), ("Ġto",), ("k",), ("ens",), ('="',), ("4", "9"), ('"',), ("/",), (">",))

THREAD_DIALECTS: dict[str, Dialect] = {
    "apar": replace(load_dialect("apar"), max_children=4, max_child_tokens=20),
    "pasta": replace(
        load_dialect("pasta"), max_children=5, max_child_tokens=24, max_opener_tokens=12, default_length=6, max_length=30
    ),
    "parallel": replace(load_dialect("parallel"), max_children=5, max_child_tokens=20),
}
BIASES: dict[str, dict[str, float]] = {  # beside 0 for letters; forced tokens are likely, so that a ban is missed
    "apar": {"[Fork]": 1.0, "[Child]": 10.0, "<|end|>": -0.3},
    "pasta": {"<promise": 3.0, "<async>": 10.0, "</async>": 1.5, "<sync/>": 1.5, "<|end|>": -0.3}
    | {text: -6.0 for texts in PROMISE[1:] for text in texts},
    "parallel": {"<Parallel>": 1.5, "<Path>": 10.0, "</Path>": 0.0, "<Conclusion>": -0.3, "<|end|>": -1.6},
}
SETTINGS = {
    "greedy": SamplingParams(),
    "greedy penalised": SamplingParams(repetition_penalty=1.02, frequency_penalty=0.2),
    "drawn": SamplingParams(1.0, seed=8),
    "filtered": SamplingParams(0.8, top_k=20, top_p=0.95, seed=3, presence_penalty=0.5),
}


@dataclass(frozen=True)
class Case:
    """One question: how a target of ``depth`` layers is asked, and in which dialect it may open threads."""

    dialect: str
    setting: str
    prompt: str = PROMPTS[0]
    depth: int = DEPTHS[0]


CASES = [Case(dialect, setting, prompt) for dialect in THREAD_DIALECTS for setting in SETTINGS for prompt in PROMPTS]


def naive_answer(
    model: PreTrainedModel,
    bound: BoundDialect,
    prompt_ids: Iterable[int],
    sampling: SamplingParams,
    end_token_ids: Iterable[int],
    choose: Choose = with_fewest_tokens,
) -> Sequence:
    """The reference's answer to a prompt."""
    prompt = list(prompt_ids)
    sequence = ThreadedSequence(bound, len(prompt), end_token_ids, sampling.max_tokens, min_tokens=sampling.min_tokens)
    naive_threads(model, sequence, prompt, sampling, choose)
    return sequence


def teach(model: LlamaForCausalLM, tokenizer: Tokenizer, chain: Iterable[Iterable[str]]) -> None:
    """Each token of a link of the chain calls those of the next one."""
    embeddings, heads = model.get_input_embeddings().weight, model.lm_head.weight
    for texts, following in pairwise(chain):
        for token in map(tokenizer.token_to_id, texts):
            embeddings[token] *= 20
            direction = embeddings[token] / embeddings[token].norm()
            for text in following:
                heads[tokenizer.token_to_id(text)] += 4 * direction


class ThreadModels:
    """For each of DEPTHS a target with the shipped tokenizer, a draft that is often right, a BiTA that has learned nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._targets = {depth: self._save(depth) for depth in DEPTHS}
        self._answers: dict[Case, Sequence] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(reference_pair() / "target" / "tokenizer.json"))

    def target(self, depth: int = DEPTHS[0]) -> PreTrainedModel:
        return self._targets[depth]

    def spec(self, depth: int, stages: int, groups: int | None = None) -> PipelineSpec:
        target, draft, bita = (self._folder / f"{name}-{depth}" for name in ("target", "draft", "bita"))
        return bare_spec(target, depth, (stages, groups or stages), draft, bita)

    def bound(self, dialect: str) -> BoundDialect:
        return bind(THREAD_DIALECTS[dialect], self.tokenizer.token_to_id, self._text_of)

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt).ids)

    def ids(self, text: str) -> list[int]:
        """Tokens written with spaces between them."""
        found = (self.tokenizer.token_to_id(word) for word in text.split())
        return [token for token in found if token is not None]

    def sampling(self, case: Case) -> SamplingParams:
        bias = dict.fromkeys(LETTERS, 0.0) | BIASES[case.dialect]
        logit_bias = {self.tokenizer.token_to_id(text): 40.0 + value for text, value in bias.items()}
        return structs.replace(SETTINGS[case.setting], max_tokens=MAX_TOKENS[case.depth], logit_bias=logit_bias)

    def answer(self, case: Case, choose: Choose = with_fewest_tokens) -> Sequence:
        """The reference's answer."""
        prompt_ids, sampling = self.prompt_ids(case.prompt), self.sampling(case)
        return naive_answer(self.target(case.depth), self.bound(case.dialect), prompt_ids, sampling, (END,), choose)

    def known_answer(self, case: Case) -> Sequence:
        """``answer``, worked out once."""
        if case not in self._answers:
            self._answers[case] = self.answer(case)
        return self._answers[case]

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _save(self, depth: int) -> PreTrainedModel:
        target, draft, bita = (self._folder / f"{name}-{depth}" for name in ("target", "draft", "bita"))
        vocab = self.tokenizer.get_vocab_size()
        model = save_tiny_llama(target, layers=depth, vocab=vocab, bos_token_id=0, eos_token_id=END, max_position_embeddings=2048)
        assert isinstance(model, LlamaForCausalLM)
        with torch.no_grad():
            self._teach_promises(model)
        model.save_pretrained(target)
        save_random_bita(bita, target)
        near = LlamaForCausalLM.from_pretrained(target)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in near.parameters():
                parameter += 0.03 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        near.save_pretrained(draft)
        for directory in (target, draft):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(reference_pair() / "target" / name, directory / name)
        return model

    def _teach_promises(self, model: LlamaForCausalLM) -> None:
        """The tokens of a tag are loud in the residual stream, whatever the number of layers, and each calls the next."""
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight *= (DEPTHS[0] / len(model.model.layers)) ** 0.5
        teach(model, self.tokenizer, PROMISE)
