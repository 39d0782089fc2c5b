"""Which of the tokens that masks have named enter, and what verdicts teach about their ranks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pipedec.core.stage_message import MaskParams
from pipedec.core.verdict import MAX_SURPRISAL
from pipedec.decoding.bita import CandidateTree, efficient, full, likeliest, straightforward
from pipedec.decoding.mask_forecast import Confidence, MaskForecast
from pipedec.model.markov import MarkovTable

FORECAST = MaskForecast(5, ((11, 12), (13, 14), (15, 16)))


def learned(masks: MaskParams, hit_ranks: dict[int, list[int | None]], times: int = 200) -> Confidence:
    """Chances after ``times`` forecasts, of which each mask's hits have these ranks in turn."""
    chances = Confidence(masks)
    rng = random.Random(0)
    named = [[100 * mask + rank for rank in range(masks.named)] for mask in range(masks.count)]
    for _ in range(times):
        tokens = []
        for mask in range(masks.count):
            rank = rng.choice(hit_ranks[mask])
            tokens.append(9999 if rank is None else named[mask][rank])
        chances.observe(MaskForecast(0, named), tokens)
    return chances


def of_ranks(chances: Confidence, mask: int, count: int) -> list[float]:
    """The chances of a mask's predictions whose surprisals are unknown."""
    _, probabilities = MaskForecast(0, (tuple(range(count)),)).after(())
    return chances.of(mask, probabilities)


def paths(tree: CandidateTree) -> list[tuple[int, ...]]:
    """Of every row the tokens below the root."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append(() if parent < 0 else (*found[parent], token))
    return found


def test_figure_5_of_the_paper() -> None:
    """Four masks that name three tokens each: only the best of a layer has children."""
    forecast = ((10, 11, 12), (20, 21, 22), (30, 31, 32), (40, 41, 42))
    tree = efficient(MaskForecast(5, forecast))
    assert tree.token_ids == [5, 10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert tree.with_masks == list(range(13))


def test_in_the_full_tree_every_candidate_has_children() -> None:
    tree = full(FORECAST)
    assert tree.token_ids == [5, 11, 12, *(13, 14) * 2, *(15, 16) * 4]
    assert tree.parents == [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert tree.with_masks == list(range(15))


def test_the_straightforward_tree_is_a_chain() -> None:
    tree = straightforward(FORECAST)
    assert (tree.token_ids, tree.parents, tree.with_masks) == ([5, 11, 13, 15], [-1, 0, 1, 2], [0])


@pytest.mark.parametrize("shape", [efficient, full, straightforward])
def test_without_a_forecast_there_is_the_root_alone(shape: object) -> None:
    assert shape(MaskForecast(5)) == CandidateTree([5], [-1], [0])  # type: ignore[operator]
    assert shape(MaskForecast(5, ((6,), (7,)))).parents == [-1, 0, 1]  # type: ignore[operator]
    assert likeliest(MaskForecast(5), Confidence(MaskParams(2, 2)), 64, 2) == CandidateTree([5], [-1], [0])


def test_chances_are_the_shares_of_each_rank() -> None:
    chances = learned(MaskParams(2, 3), {0: [0, 0, 2, None], 1: [1]}, times=4000)
    first, second = (of_ranks(chances, mask, 3) for mask in range(2))
    assert first == pytest.approx([0.5, 0.0, 0.25], abs=0.03)
    assert second[1] > 0.99


def test_a_mask_learns_only_after_those_before_it_were_right() -> None:
    chances = Confidence(MaskParams(2, 1))
    before = [of_ranks(chances, mask, 1) for mask in range(2)]
    chances.observe(MaskForecast(0, ((1,), (2,))), (7,))  # a surprise ended the verdict: nothing is known of the second place
    after = [of_ranks(chances, mask, 1) for mask in range(2)]
    assert after[0] < before[0] and after[1] == before[1]


def test_a_short_forecast_comes_from_the_last_masks_of_a_group() -> None:
    chances = Confidence(MaskParams(3, 1))
    for _ in range(50):
        chances.observe(MaskForecast(0, ((5,),), first=2), (5,))
    first, second, third = (of_ranks(chances, mask, 1) for mask in range(3))
    assert third[0] > 0.8 > first[0] == second[0]


def test_masks_follow_rows_at_which_paths_end() -> None:
    """Where the second mask is never right, a path ends at the first candidate: fresh masks are needed there."""
    chances = learned(MaskParams(2, 2), {0: [0], 1: [None]})
    tree = likeliest(MaskForecast(5, ((1, 2), (3, 4))), chances, 8, 2)
    assert tree.with_masks[:2] == [0, paths(tree).index((1,))]


@pytest.mark.parametrize("rows", [1, 4, 9, 64, 300])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_rows_of_all_within_the_limit(rows: int, seed: int) -> None:
    rng = random.Random(seed)
    masks = MaskParams(3, 5)
    chances = learned(masks, {mask: [rng.choice([0, 0, 1, 2, 3, 4, None]) for _ in range(7)] for mask in range(3)}, 60)
    forecast = [[10 * mask + rank for rank in range(5)] for mask in range(rng.randint(1, 3))]
    tree = likeliest(MaskForecast(7, forecast), chances, rows, masks.count)
    found = paths(tree)
    assert len(set(found)) == len(found) and found[0] == ()
    assert len(tree.token_ids) + masks.count * len(tree.with_masks) <= max(rows, 1 + masks.count)
    assert tree.with_masks[0] == 0 and len(set(tree.with_masks)) == len(tree.with_masks)
    # No candidate that was left out is likelier than one that was taken, when its parent was taken.
    of_place = [dict(zip(named, of_ranks(chances, mask, 5), strict=True)) for mask, named in enumerate(forecast)]

    def chance(path: tuple[int, ...]) -> float:
        product = 1.0
        for place, token in enumerate(path):
            product *= of_place[place][token]
        return product

    inner = [path for path in found if len(path) < len(forecast)]
    children = {(*path, token) for path in inner for token in of_place[len(path)]}
    left_out = children - set(found)
    if left_out and len(found) > 1:
        assert min(map(chance, found[1:])) >= max(map(chance, left_out)) - 1e-12


TABLE = MarkovTable(
    np.eye(20, dtype=np.float32), 10 * np.eye(20, k=1, dtype=np.float32), np.array([[0.0], [1.0], [0.5]]) * np.ones(20)
)
"""Of 20 tokens: after token u token u − 1 is likelier, by 0, 10 and 5 nats at the three masks."""
SURPRISALS = ((256, 512), (256, 512), (256, 256 * 7))


def test_a_markov_table_ranks_predictions_by_the_token_before() -> None:
    forecast = MaskForecast(12, ((11, 12), (10, 11), (8, 9)), SURPRISALS, markov=TABLE)

    def after(*path: int) -> list[int]:
        return list(forecast.after(path)[0])

    assert after() == [11, 12]  # the first mask has nothing to learn from the root
    assert (after(11), after(12)) == ([10, 11], [11, 10])
    assert after(12, 10) == [8, 9]  # 5 nats are less than the 6 between them
    assert after(12, 11, 9) == []
    assert paths(full(forecast))[:7] == [(), (11,), (12,), (11, 10), (11, 11), (12, 11), (12, 10)]


def test_probabilities_after_a_path_are_those_of_all_tokens() -> None:
    """The logit of token 11 grows by 10 nats, and the tokens that are not named keep theirs."""
    forecast = MaskForecast(12, ((10, 11),), ((256, 512),), first=1, markov=TABLE)
    tokens, probabilities = forecast.after(())
    first, second = math.exp(-1), math.exp(-2 + 10)
    total = first + second + 1 - math.exp(-1) - math.exp(-2)
    assert tokens == [11, 10] and probabilities == pytest.approx([second / total, first / total])
    plain = MaskForecast(12, ((10, 11),), ((256, 512),), first=1)
    assert plain.after(())[0] == (10, 11) and plain.after(())[1] == pytest.approx([math.exp(-1), math.exp(-2)])
    assert list(MaskForecast(12, ((10, 11),), first=1, markov=TABLE).after(())[0]) == [10, 11]  # surprisals are unknown
    assert MaskForecast(12, ((10, 11),), ((256, 512),), 1, TABLE, scale=0.05).after(())[0] == [10, 11]


def test_surprisals_of_tokens_that_cannot_be_chosen_are_sound() -> None:
    impossible = (MAX_SURPRISAL, MAX_SURPRISAL)
    tokens, probabilities = MaskForecast(12, ((10, 11),), (impossible,), first=1, markov=TABLE).after(())
    assert sorted(tokens) == [10, 11] and np.isfinite(probabilities).all()
    assert Confidence(MaskParams(3, 2)).of(0, np.array([1.0, 0.0]))[0] > 0.7


def test_confidence_is_learned_by_probability_in_the_order_of_the_path() -> None:
    chances = Confidence(MaskParams(2, 2))
    forecast = MaskForecast(12, ((11, 12), (10, 11)), ((256, 512), (256, 512)), markov=TABLE)
    for _ in range(200):
        chances.observe(forecast, (12, 11))
    assert chances.of(0, forecast.after(())[1])[1] > 0.9  # the second prediction, which is always right
    assert chances.of(1, forecast.after((12,))[1])[0] > 0.9
    assert chances.of(1, np.array([0.3]))[0] == pytest.approx(0.29, abs=0.01)  # of such ones nothing is known yet
