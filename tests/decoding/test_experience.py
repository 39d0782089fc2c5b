"""Experience as plain data: another process begins where this one ended, by kind of request; costs age."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.decoding import Experience
from pipedec.decoding.acceptance import AcceptanceModel, Choices
from pipedec.decoding.controller import CHILDREN, Controller, EnteredCounts, TimestepTiming
from pipedec.decoding.learned import GREEDY, NOTHING_LEARNED, LearnedAcceptance, LearnedCosts, LearnedRates, MeasuredRows, kind_of
from pipedec.decoding.proposers import Match, MatchRates
from pipedec.decoding.row_costs import RowCosts
from pipedec.methods import BestFirstOptions

PASSAGE = 4
PRIOR = {"draft": {"log probability": 1.0}}
GREEDILY = TokenizedRequest(0, (1, 2))
DRAWN = replace(GREEDILY, sampling=SamplingParams(temperature=0.6))


def restarted(learned: LearnedAcceptance, costs: LearnedCosts | None = None) -> Experience:
    """The experience of another process, by way of JSON."""
    read = msgspec.json.decode(msgspec.json.encode(learned), type=LearnedAcceptance)
    return Experience(PASSAGE, read, costs and msgspec.json.decode(msgspec.json.encode(costs), type=LearnedCosts))


def test_kinds_of_requests() -> None:
    structured = replace(GREEDILY, sampling=SamplingParams(structured_outputs=StructuredOutputs(regex="a+")))
    ngrams = replace(DRAWN, options=BestFirstOptions(proposers=("ngrams",)))
    kinds = [kind_of(one) for one in (GREEDILY, DRAWN, structured, ngrams, replace(GREEDILY, threads="{}"))]
    assert kinds == [GREEDY, "sampled", "greedy structured", "sampled ngrams", "greedy threads"]
    assert kind_of(replace(GREEDILY, options=BestFirstOptions(width=4))) == GREEDY, "limits change no chance"


def test_another_process_begins_with_the_statistics_of_the_same_kind() -> None:
    first = Experience(PASSAGE)
    for request, weight, rate_of in ((GREEDILY, 0.25, 1), (DRAWN, 0.5, 0)):
        first.learned(request, AcceptanceModel, PRIOR).weights[0] = weight
        first.learned(request, MatchRates).observe("ngrams", {7: Match(5, 1)}, 7 if rate_of else 8)
    second = restarted(first.acceptance)
    for request, weight in ((GREEDILY, 0.25), (DRAWN, 0.5)):
        assert second.learned(request, AcceptanceModel, PRIOR).weights[0] == weight
        assert second.learned(request, MatchRates).rate("ngrams", 5) == first.learned(request, MatchRates).rate("ngrams", 5)
    assert (
        second.learned(GREEDILY, MatchRates).rate("ngrams", 5)
        > MatchRates().rate("ngrams", 5)
        > second.learned(DRAWN, MatchRates).rate("ngrams", 5)
    )
    threads = replace(GREEDILY, threads="{}")
    assert second.learned(threads, AcceptanceModel, PRIOR).weights[0] == 0.25, "for want of its own, those of greedy requests"


def test_statistics_that_were_not_needed_are_kept_and_those_without_a_name_do_not_outlive_the_process() -> None:
    first = restarted(LearnedAcceptance(kinds={"sampled": LearnedRates(acceptance={"draft": {"log probability": 0.5}})}))
    first.learned(GREEDILY, AcceptanceModel, PRIOR).weights[0] = 0.25
    assert isinstance(first.learned(GREEDILY, list), list)
    second = restarted(first.acceptance)
    assert second.learned(DRAWN, AcceptanceModel, PRIOR).weights[0] == 0.5
    assert second.learned(GREEDILY, AcceptanceModel, PRIOR).weights[0] == 0.25
    assert Experience(PASSAGE).acceptance == NOTHING_LEARNED


def test_many_children_are_remembered_and_given_up_soon() -> None:
    first = Experience(PASSAGE)
    for number in range(100):
        first.controller.record_proposed(number % 2 == 0)
    second = restarted(first.acceptance).controller
    assert (second.children, second.proposes_seen) == (CHILDREN[-1], True)
    for _ in range(64):
        second.record_proposed(True)
    assert (second.children, second.proposes_seen) == (CHILDREN[0], False)


def measured(rows: dict[int, float]) -> Controller:
    controller = Controller(PASSAGE)
    for count, seconds in rows.items():
        for _ in range(3 * PASSAGE):
            controller.record_entered(EnteredCounts(count, 0, 1))
            controller.record_accepted(1, True)
            controller.record_timestep(TimestepTiming(seconds, 0.5 * seconds, (0.01 * seconds,) * 8))
    return controller


def test_another_process_begins_with_the_costs() -> None:
    first = measured({8: 0.010, 16: 0.020})
    second = restarted(NOTHING_LEARNED, first.costs).controller
    fresh = Controller(PASSAGE)
    assert second.forwards == first.forwards != fresh.forwards
    for rows, chance in ((8, 0.01), (8, 0.2), (12, 0.01), (12, 0.2)):
        assert second.pays(rows, chance) is first.pays(rows, chance)
    assert restarted(NOTHING_LEARNED, LearnedCosts(speculates=False)).controller.is_speculating is False
    assert fresh.is_speculating is second.is_speculating is True
    assert fresh.pays(7, 0.001) and not second.pays(12, 0.001), "it knows that more rows take longer"


def test_costs_of_an_earlier_process_are_forgotten_unless_they_are_measured_again() -> None:
    costs = RowCosts()
    costs.start_from([MeasuredRows(8.0, 0.010, 0), MeasuredRows(16.0, 0.500, 0)])
    assert costs.seconds(16) == 0.5
    for _ in range(600):
        costs.record(8, 0.010)
    assert costs.seconds(16) == pytest.approx(0.010)


def test_a_prior_that_is_right_stays() -> None:
    choices = Choices(torch.tensor([[7]]), torch.tensor([[[0.0], [-4.0]]]))
    acceptance = Experience(
        PASSAGE, LearnedAcceptance(kinds={GREEDY: LearnedRates(acceptance={"draft": {"log probability": 2.0}})})
    )
    model = acceptance.learned(GREEDILY, AcceptanceModel, PRIOR)
    for _ in range(70):
        model.observe(choices, 0, 7)
    assert model.weights[0] >= 2.0
