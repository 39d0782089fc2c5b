"""Mask rows give the outputs that transformers gives, and never influence other rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny, save_tiny_llama
from support.examples import examples
from support.kv_caches import read_cache
from support.naive_bita import NaiveBita
from support.stage_chain import StageChain, lone_cache
from torch import Tensor
from torch.nn import functional

from pipedec.model import BitaWeights, LaneRows, StageModel
from pipedec.tree import PredictionTree, Visibility, mask_groups

MASKS = 3
WINDOW = 5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-group": ("llama", {"kv_heads": 1, "head_dim": 16, "attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


class Growing:
    """A chain of stages and its prediction tree of random tokens, drawn with ``seed``."""

    def __init__(self, chain: StageChain, seed: int, prompt_length: int = 9) -> None:
        self.chain, self.chooser = chain, random.Random(seed)
        self.accepted = [self.chooser.randrange(60) for _ in range(prompt_length)]
        self.tree = PredictionTree()
        self.tree.reset(prompt_length)
        chain.reset()
        chain.prefill(torch.tensor(self.accepted), 4)

    def path(self, row: int) -> list[int]:
        """Token ids up to a row of the tree, the prompt included."""
        return self.accepted + self.tree.token_ids[self.tree.tree_mask[row]].tolist()

    def step(self, num_tokens: int, num_masks: int) -> tuple[list[Tensor], Tensor]:
        """Enter a root, random rows below it and a mask group behind each; return every stage's output and the groups' rows."""
        parents = torch.tensor([-1, *(self.chooser.randrange(row) for row in range(1, num_tokens))])
        self.tree.append(torch.tensor(self.chooser.sample(range(60), num_tokens)), parents)
        masks, behind = mask_groups(torch.arange(num_tokens), num_tokens, num_masks)
        self.tree.append(masks, behind)
        tree = self.tree
        hidden = self.chain.hidden(tree.token_ids, tree.positions, tree.tree_mask, num_masks=len(masks))
        return hidden, torch.arange(num_tokens, tree.num_rows).view(num_tokens, -1)

    def accept(self, num_tokens: int) -> None:
        """Accept a random token row, and a token behind it that has no row."""
        said = self.tree.token_ids[self.tree.tree_mask[self.chooser.randrange(num_tokens)]].tolist()
        self.accepted += said
        advance = self.tree.advance_to([*said[1:], 60 + self.chooser.randrange(4)])
        self.chain.advance(advance.committed.tolist(), advance.kept.tolist())


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NaiveBita, BitaWeights]:
    path = tmp_path_factory.mktemp("target")
    family, kwargs = MODELS[request.param]
    model = save_tiny(family, path, **kwargs)
    weights = save_random_bita(path / "bita", path, MASKS)
    return path, NaiveBita(model.double(), weights), weights


@pytest.mark.fast_cases("llama-cut0", "mistral-window-cut1")
@pytest.mark.parametrize("cut", [(4,), (1, 2, 1)])
def test_mask_rows_equal_transformers(target: tuple[Path, NaiveBita, BitaWeights], cut: tuple[int, ...]) -> None:
    """Mask groups behind candidates of several depths in one step, over several steps, with one stage and several."""
    path, naive, weights = target
    for seed in range(3):
        growing = Growing(StageChain(path, cut, torch.float64, bita=weights), seed)
        for num_tokens in (6, 1, 4):
            hidden, groups = growing.step(num_tokens, MASKS)
            found = growing.chain.stages[-1].logits(hidden[-1])
            for row in range(num_tokens):
                text = growing.path(row)
                torch.testing.assert_close(found[groups[row]], naive.logits(text), atol=1e-9, rtol=0)
                with torch.inference_mode():
                    expected = naive.model(torch.tensor([text])).logits[0, -1]
                torch.testing.assert_close(found[row], expected, atol=1e-9, rtol=0)
            growing.accept(num_tokens)
            assert {cache.length for cache in growing.chain.caches} == {len(growing.accepted)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path)
    return path


def ordinary_rows(chain: StageChain, seed: int, num_masks: int) -> list[Tensor]:
    """For the ordinary rows of three steps: every stage's output, and its cache before and after each verdict."""
    growing, seen = Growing(chain, seed), []
    for num_tokens in (1, 7, 3):
        past = len(growing.accepted)
        seen += [rows[:num_tokens] for rows in growing.step(num_tokens, num_masks)[0]]
        seen += [held[:, :, : past + num_tokens] for held in cached(chain)]
        growing.accept(num_tokens)
        seen += cached(chain)
    return [tensor.clone() for tensor in seen]


def cached(chain: StageChain) -> list[Tensor]:
    """[2, K, slots, D] of every layer."""
    return [
        torch.stack(read_cache(cache, layer))
        for stage, cache in zip(chain.stages, chain.caches, strict=True)
        for layer in range(len(stage.layers))
    ]


def random_weights(seed: int, scale: float = 1.0) -> BitaWeights:
    generator = torch.Generator().manual_seed(seed)
    return BitaWeights(
        scale * torch.randn(4, 2, 2, 5, 8, generator=generator), scale * torch.randn(MASKS, 32, generator=generator)
    )


@examples(8)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([torch.float32, torch.float64]), huge=st.booleans())
def test_ordinary_rows_do_not_depend_on_the_learned_weights(llama: Path, seed: int, dtype: torch.dtype, huge: bool) -> None:
    """Bit for bit, at every stage and in every cache, even if all learned weights are NaN."""
    learned = [random_weights(1), random_weights(2, 1e4 if huge else 1.0), random_weights(3, float("nan"))]
    first, *others = [ordinary_rows(StageChain(llama, (1, 3), dtype, bita=weights), seed, MASKS) for weights in learned]
    for other in others:
        assert all(torch.equal(one, another) for one, another in zip(first, other, strict=True))


def test_ordinary_rows_do_not_depend_on_the_presence_of_masks(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit if matrix products run row by row; the CPU's own rounding depends on the number of rows."""

    def compare(equal: bool) -> None:
        for seed in range(2):
            plain = ordinary_rows(StageChain(llama, (1, 3)), seed, 0)
            masked = ordinary_rows(StageChain(llama, (1, 3), bita=random_weights(seed)), seed, MASKS)
            for one, other in zip(plain, masked, strict=True):
                torch.testing.assert_close(other, one, atol=0 if equal else 1e-4, rtol=0)

    compare(equal=False)
    linear = functional.linear

    def row_by_row(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([linear(row, weight, bias) for row in rows.split(1)])

    monkeypatch.setattr(functional, "linear", row_by_row)
    compare(equal=True)


def test_masks_need_a_bita(llama: Path) -> None:
    stage = StageModel.load(llama, range(0, 1), torch.float32, "cpu")
    ids, positions = torch.tensor([5, -1]), torch.arange(2)
    chain = Visibility(torch.ones(2, 2, dtype=torch.bool).tril(), 0, lambda: positions)
    for visibility in (chain, None):
        with pytest.raises(ValueError, match="mask rows need a BiTA"):
            stage.forward(ids, [LaneRows(positions, lone_cache(stage), visibility, num_masks=1)])
    weights = random_weights(0)
    stage.attach(BitaWeights(weights.prompt[:1], weights.masks))
    cache = lone_cache(stage, with_prompt=True)
    assert stage.forward(ids, [LaneRows(positions, cache, chain, num_masks=1)]).shape == (2, 32)
