"""The stage model equals transformers: as one stage and several, for every family and rope type, for chains and trees."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny, save_tiny_llama, stage_parameters
from support.examples import examples
from support.stage_chain import BOTH_IMPLS, ROPES, StageChain, lone_cache
from transformers import AutoModelForCausalLM

from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.model.rows import LaneRows
from pipedec.model.stage_model import StageModel
from pipedec.tree import Visibility

MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16, "kv_heads": 1, "hidden_act": "gelu"}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 16, "kv_heads": 1, "tie_word_embeddings": True, "attention_bias": True}),
    "olmo2": ("olmo2", {"kv_heads": 4}),
    "olmo2-groups": ("olmo2", {"attention_bias": True}),
    "qwen3-window": ("qwen3", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
}
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-5}


def random_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode_with_transformers(directory, ids, prompt_length, dtype):
    """Logits [T, V]: the prompt in one forward, then token by token, as in ``generate``."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    output = model(ids[None, :prompt_length], use_cache=True)
    logits = [output.logits[0]]
    for token in ids[prompt_length:]:
        output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0])
    return torch.cat(logits)


def decode_with_stages(directory, ids, prompt_length, dtype, cut, chunk, impl):
    chain = StageChain(directory, cut, dtype, impl=impl)
    return torch.cat([chain.prefill(ids[:prompt_length], chunk)] + [chain.decode(token) for token in ids[prompt_length:]])


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        *((name, "pipedec") for name in MODELS),
        *((name, "transformers") for name in ("llama-biases", "mistral-window", "olmo2", "qwen3-window")),
    ],
)
def test_logits_equal_transformers_with_one_stage_and_several(tmp_path, name, impl):
    dtype = torch.float32 if name == "llama" else torch.float64
    family, kwargs = MODELS[name]
    save_tiny(family, tmp_path, **kwargs)
    ids = random_ids(24)
    expected = decode_with_transformers(tmp_path, ids, 13, dtype)
    for cut, chunk in (((4,), 13), ((1, 2, 1), 4)):
        found = decode_with_stages(tmp_path, ids, 13, dtype, cut, chunk, impl)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(
    ("rope", "impl"), [*((rope, "pipedec") for rope in ROPES), ("dynamic", "transformers"), ("longrope", "transformers")]
)
def test_every_rope_type_equals_transformers_below_and_above_the_trained_length(tmp_path, rope, impl):
    save_tiny_llama(tmp_path, layers=2, rope_parameters={"rope_theta": 1000.0, **ROPES[rope]}, max_position_embeddings=16)
    ids = random_ids(26)
    for prompt_length in (6, 21):
        expected = decode_with_transformers(tmp_path, ids, prompt_length, torch.float32)
        found = decode_with_stages(tmp_path, ids, prompt_length, torch.float32, (1, 1), 5, impl)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=0)


def test_unsupported_rope_types_are_refused(tmp_path):
    save_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for rope, words in (
        ({"rope_type": "spiral"}, "'spiral' .* is not known"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "4 of 8 numbers of a head"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 1000.0, **rope}}))
        with pytest.raises(UserError, match=words):
            StageModel.load(tmp_path, range(0, 1), torch.float32, "cpu")


def test_half_precision_stays_near_transformers(tmp_path):
    save_tiny_llama(tmp_path, dtype=torch.bfloat16)
    ids = random_ids(20)
    expected = decode_with_transformers(tmp_path, ids, 12, torch.bfloat16).float()
    found = decode_with_stages(tmp_path, ids, 12, torch.bfloat16, (2, 2), 12, "pipedec")
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.03 * expected.abs().mean()


class GrowingTree:
    """A random tree over a prompt, and the path of every row."""

    def __init__(self, chooser: random.Random, prompt: list[int]) -> None:
        self.chooser, self.accepted = chooser, prompt
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def path(self, row: int) -> list[int]:
        ancestors = [] if self.parents[row] < 0 else self.path(self.parents[row])
        return [*ancestors, row]

    def grow(self, rows: int) -> None:
        for _ in range(rows):
            self.parents.append(self.chooser.randrange(-1, len(self.tokens)))
            self.tokens.append(self.chooser.randrange(64))

    def step(self, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and mask of the rows from ``first`` on."""
        total = len(self.tokens)
        mask = torch.zeros(total - first, total, dtype=torch.bool)
        for row in range(first, total):
            mask[row - first, self.path(row)] = True
        positions = len(self.accepted) + mask.sum(1) - 1
        return torch.tensor(self.tokens[first:]), positions, mask

    def accept(self, row: int) -> tuple[list[int], list[int]]:
        """The rows to commit and to keep when this row and its path are accepted."""
        committed = self.path(row)
        kept = [other for other in range(len(self.tokens)) if row in self.path(other)[:-1]]
        self.accepted = self.accepted + [self.tokens[index] for index in committed]
        self.parents = [kept.index(self.parents[index]) if self.parents[index] != row else -1 for index in kept]
        self.tokens = [self.tokens[index] for index in kept]
        return committed, kept


@pytest.fixture(scope="module", params=[("llama", "pipedec"), ("mistral", "pipedec"), ("mistral", "transformers")], ids="-".join)
def tree_target(request, tmp_path_factory):
    """A checkpoint as a transformers model and as a chain of stages; Mistral's window is smaller than the context."""
    path = tmp_path_factory.mktemp("tree_target")
    family, impl = request.param
    model = save_tiny(family, path, layers=3, **({"sliding_window": 4} if family == "mistral" else {}))
    return model, StageChain(path, (1, 2), impl=impl)


@examples(12)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_of_random_trees_equal_a_forward_of_their_own_path(tree_target, seed):
    model, chain = tree_target
    chooser = random.Random(seed)
    tree = GrowingTree(chooser, [chooser.randrange(64) for _ in range(chooser.randrange(1, 8))])
    chain.reset()
    chain.prefill(torch.tensor(tree.accepted), 3)
    for _ in range(4):
        first = len(tree.tokens)
        tree.grow(chooser.randrange(1, 6))
        found = chain.forward(*tree.step(first))
        for row in range(first, len(tree.tokens)):
            sequence = tree.accepted + [tree.tokens[index] for index in tree.path(row)]
            with torch.no_grad():
                expected = model(torch.tensor([sequence])).logits[0, -1]
            torch.testing.assert_close(found[row - first], expected, atol=2e-4, rtol=0)
        if chooser.random() < 0.7:
            chain.advance(*tree.accept(chooser.randrange(len(tree.tokens))))
    assert all(cache.past_length == len(tree.accepted) for cache in chain.caches)
    assert all(cache.tree_length == len(tree.tokens) for cache in chain.caches)


@BOTH_IMPLS
def test_memory_matches_the_configs_count(tmp_path, impl):
    for name in ("llama-biases", "llama-tied"):
        family, kwargs = MODELS[name]
        save_tiny(family, tmp_path / name, **kwargs)
        for layers in (range(0, 1), range(1, 4), range(0, 4)):
            stage = StageModel.load(tmp_path / name, layers, torch.float64, "cpu", model_config(tmp_path / name, impl))
            assert stage.stack.num_bytes == 8 * stage_parameters(tmp_path / name, layers)
            assert stage.layers == layers


@BOTH_IMPLS
def test_progress_counts_every_tensor_once(tmp_path, impl):
    save_tiny_llama(tmp_path)
    calls: list[tuple[int, int]] = []
    config = model_config(tmp_path, impl)
    StageModel.load(tmp_path, range(0, 2), torch.float32, "cpu", config, lambda done, total: calls.append((done, total)))
    assert calls == [(done, 19) for done in range(1, 20)]


def seen_rows(rows: int, slots: int) -> Visibility:
    return Visibility(torch.ones(rows, slots, dtype=torch.bool), 0, lambda: torch.arange(slots))


def test_misuse_is_refused(tmp_path):
    save_tiny_llama(tmp_path)
    with pytest.raises(UserError, match="4 layers"):
        StageModel.load(tmp_path, range(3, 5), torch.float32, "cpu")
    stage = StageModel.load(tmp_path, range(0, 2), torch.float32, "cpu")
    cache = lone_cache(stage)
    with pytest.raises(ValueError, match="only the last stage"):
        stage.logits(torch.zeros(1, 32))
    with pytest.raises(ValueError, match="at least one row"):
        stage.forward(random_ids(0), [LaneRows(torch.arange(0), cache)])
    with pytest.raises(ValueError, match="mask"):
        stage.forward(random_ids(2), [LaneRows(torch.arange(2), cache, seen_rows(2, 3))])
    stage.forward(random_ids(1), [LaneRows(torch.arange(1), cache, seen_rows(1, 1))])
    with pytest.raises(ValueError, match="prompt chunk"):
        stage.forward(random_ids(1), [LaneRows(torch.arange(1), cache)])
