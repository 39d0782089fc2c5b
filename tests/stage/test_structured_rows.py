"""On the last stage every row gets the best token among those that its structure allows behind the row's path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.examples import examples
from torch import Tensor

from pipedec.core import SamplingParams, StructuredOutputs, Verdict
from pipedec.directories import reference_pair
from pipedec.grammar import NOTHING, Bitmask, Vocabulary
from pipedec.grammar.masks import allowed_tokens, mask_logits
from pipedec.sampling import Sampler
from pipedec.stage.verification import TokenChooser
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import Sequence
from pipedec.tree import Forest

VOCABULARY = Vocabulary(Tokenizer(reference_pair() / "target"))
WIDTH = 4096 + 7  # the model has tokens that the tokenizer does not have
END = 1
STRUCTURES = [
    StructuredOutputs(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    StructuredOutputs(regex="(one|two|three){2,5}"),
    StructuredOutputs(choice=("yes", "yes, sir", "no")),
]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, seed=3, top_k=4, repetition_penalty=1.3)]


def naive(sequence: Sequence, sampling: SamplingParams, logits_1V: Tensor, path: list[int]) -> int:
    """The token after accepted tokens and ``path``, in a call of its own."""
    said = [*sequence.main.token_ids, *path]
    grammar = VOCABULARY.grammar(sampling.structured_outputs)
    grammar.advance(said)
    allowed_V = torch.zeros(WIDTH, dtype=torch.bool)
    allowed_V[list(grammar.allowed())] = True
    logits_1V = logits_1V.masked_fill(~allowed_V, -torch.inf) if allowed_V.any() else logits_1V
    if sampling.is_plainly_greedy:
        return int(logits_1V.argmax())
    sampler = Sampler(sampling, WIDTH, "cpu")
    sampler.add_accepted(torch.tensor(said, dtype=torch.int64))
    position, nothing = torch.tensor([sequence.prompt_length + len(said)]), torch.zeros(0, dtype=torch.int64)
    return int(sampler.choose(logits_1V, position, torch.zeros(1, 0, dtype=torch.bool), nothing)[0])


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.kind)
@pytest.mark.parametrize("base", SAMPLINGS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_said", [0, 1, 2])
def test_each_row_gets_a_token_that_may_follow_its_path(
    structure: StructuredOutputs, base: SamplingParams, num_said: int
) -> None:
    sampling, noise = replace(base, structured_outputs=structure), torch.Generator().manual_seed(num_said)
    sequence = Sequence(5, (END,), 1000, VOCABULARY.grammar(structure))
    assert sequence.grammar is not None
    for _ in range(num_said):
        sequence.accept(0, next(iter(sequence.grammar.allowed())))
    forest, chooser = Forest(sequence), TokenChooser(sequence, sampling, WIDTH, "cpu")
    logits_1V = torch.randn(1, WIDTH, generator=noise)
    first = int(chooser.first(logits_1V)[0])
    assert first == naive(sequence, sampling, logits_1V, [])
    assert first in sequence.grammar.allowed()
    chooser.replayed(forest.advance(Verdict.of(first))[1])
    rows = entered(forest, sequence, first, noise)
    logits_RV = torch.randn(len(rows), WIDTH, generator=noise)
    chosen = chooser.choose(logits_RV, forest, slice(0, len(rows))).tolist()
    assert chosen == [naive(sequence, sampling, one[None], path) for one, path in zip(logits_RV, rows, strict=True)]


def entered(forest: Forest, sequence: Sequence, root: int, noise: torch.Generator) -> list[list[int]]:
    """Rows that enter: the root and random descendants, a few of them impossible. Returns their paths below the root."""
    assert sequence.grammar is not None
    paths, parents = [list[int]()], [-1]
    for parent in [0, 0, 1, 1, 2, 3]:
        possible = list(sequence.grammar.allowed(paths[parent]))
        drawn = int(torch.randint(WIDTH, (1,), generator=noise))
        token = possible[drawn % len(possible)] if possible and drawn % 5 else drawn
        if [*paths[parent], token] in paths:
            token = drawn
        paths.append([*paths[parent], token])
        parents.append(parent)
    forest.append(torch.tensor([root, *(path[-1] for path in paths[1:])]), torch.tensor(parents))
    return paths


@examples(40)
@given(sets=st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=5), width=st.integers(1, 70))
def test_masks_become_tensors_of_any_width(sets: list[set[int]], width: int) -> None:
    allowed_RV = allowed_tokens([Bitmask.of(*tokens) for tokens in sets], width, "cpu")
    assert allowed_RV.tolist() == [[token in tokens for token in range(width)] for tokens in sets]


def test_a_row_on_an_impossible_path_keeps_its_logits() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    masked_RV = mask_logits(logits_RV, [NOTHING, Bitmask.of(1)])
    assert masked_RV.tolist() == [[1.0, 2.0, 3.0], [-torch.inf, 2.0, -torch.inf]]
    assert logits_RV.isfinite().all(), "the logits themselves are needed for log-probabilities"
