"""The experts that rows of a mixture have in common: counted as a plain forward routes them, and fitted by one number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.refusals import refusal
from support.tiny_pair import SENTENCES, Pair
from support.toy_training import TOY_MIXTURE
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.mixtures import (
    KINDS,
    OverlapConfig,
    Routing,
    Rows,
    distinct_experts,
    fitted_overlap,
    measure_overlap,
    mixtures,
)
from pipedec.core.errors import UserError
from pipedec.plan.roofline import ExpertReads
from pipedec.verify.reference import load_transformers

PROMPTS = [[5, 6, 7], [8, 9], [7, 7, 5, 6]]
CONFIG = OverlapConfig(rows=(1, 2, 4), max_tokens=7)
EXPERTS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def mixture(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("mixture")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair.target)
    dense = LlamaForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    model = replace(TOY_MIXTURE.mixture, router_std=1.0).model(dense)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def routed(target: object, ids: Tensor) -> Tensor:
    """The experts of a text's tokens, [L, T, K], by the logits of the target's own routers."""
    logits = target(input_ids=ids, output_router_logits=True).router_logits  # type: ignore[operator]
    return torch.stack([layer.topk(TOP_K).indices for layer in logits])


@torch.no_grad()
def test_rows_are_those_of_the_answers_and_of_tokens_after_them(mixture: Path) -> None:
    target = load_transformers(mixture, torch.float32)
    rows = Rows(target, PROMPTS, CONFIG)
    answers = [target.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=0) for prompt in PROMPTS]
    wanted = [routed(target, ids)[:, len(prompt) :] for prompt, ids in zip(PROMPTS, answers, strict=True)]
    assert all(map(torch.equal, rows.answered, wanted))
    tails = [answer[:, place:] for answer in wanted for place in range(answer.shape[1])]
    assert all(any(path.shape == tail.shape and torch.equal(path, tail) for tail in tails) for path in rows.of_kind("path"))
    strangers = list(rows.of_kind("strangers"))
    assert len(strangers) == 8 * len(PROMPTS) and all(one.shape == (len(wanted[0]), len(PROMPTS), TOP_K) for one in strangers)
    contexts = [
        ids[:, :length] for prompt, ids in zip(PROMPTS, answers, strict=True) for length in range(len(prompt), ids.shape[1])
    ]
    children = []
    for context in contexts:
        most_likely = target(input_ids=context).logits[0, -1].topk(4).indices
        texts = torch.cat([context.expand(4, -1), most_likely[:, None]], 1)
        children.append(routed(target, texts).unflatten(1, texts.shape)[:, :, -1])
    siblings = list(rows.of_kind("siblings"))
    assert len(siblings) == len(children) == sum(answer.shape[1] for answer in wanted)
    for one in siblings:
        assert any(torch.equal(one.sort(-1).values, child.sort(-1).values) for child in children)


def test_distinct_experts_and_their_overlap() -> None:
    assert distinct_experts(torch.tensor([[[0, 1], [1, 0]], [[0, 1], [2, 3]]])) == 3
    drawn = torch.stack([torch.randperm(16)[:2] for _ in range(40_000)]).view(1, -1, 8, 2)
    independent = sum(distinct_experts(rows) for rows in drawn.unbind(1)) / drawn.shape[1]
    assert independent == pytest.approx(ExpertReads(0, 0, 16, 2, 0).distinct(8), abs=0.05)
    for overlap in (-0.2, 0.0, 0.257):
        assert fitted_overlap({rows: ExpertReads(0, 0, 16, 2, overlap).distinct(rows) for rows in (1, 4, 32)}, 16, 2) == overlap


def test_every_kind_is_measured_as_far_as_it_reaches(mixture: Path) -> None:
    config = OverlapConfig(rows=(1, 2, 64), max_tokens=7)
    measured = {row["kind"]: row for row in measure_overlap(load_transformers(mixture, torch.float32), PROMPTS, config)}
    assert tuple(measured) == KINDS
    assert {kind: list(row["distinct"]) for kind, row in measured.items()} == {
        "path": [1, 2], "siblings": [1, 2, 64], "strangers": [1, 2],
    }  # fmt: skip
    for row in measured.values():
        assert row["distinct"][1] == row["independent"][1] == TOP_K and (row["num_experts"], row["top_k"]) == (EXPERTS, TOP_K)
        assert all(TOP_K <= distinct <= min(EXPERTS, TOP_K * rows) for rows, distinct in row["distinct"].items())
        assert 0 <= row["shares"]["least"] <= 1 / EXPERTS <= row["shares"]["most"] <= 1
    assert measured["path"]["sets"][1] > measured["path"]["sets"][2], "a path from an answer's last token has one row"


def test_the_command_writes_a_row_of_each_kind(mixture: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SENTENCES[:3]))
    flags = ["--target", str(mixture), "--prompts", str(prompts), "--rows", "1,2", "--max-tokens", "4", "--device", "cpu"]
    result = CliRunner().invoke(mixtures, ["overlap", *flags, "--out", str(out)])
    assert result.exit_code == 0 and all(kind in result.output for kind in (*KINDS, "independent"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["kind"] for row in rows] == list(KINDS) and rows[0]["config"]["prompts"] == 3


def test_layers_of_different_kinds_are_refused(mixture: Path) -> None:
    target = load_transformers(mixture, torch.float32)
    experts = target.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:3])
    with pytest.raises(UserError, match="different numbers of experts: 3, 4"):
        Routing(target)


def test_a_dense_target_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no experts: give a mixture"):
        Routing(load_transformers(pair.target, torch.float32))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": SENTENCES[0]}))
    result = CliRunner().invoke(mixtures, ["overlap", "--target", str(pair.target), "--prompts", str(prompts)])
    assert "has no experts: give a mixture" in refusal(result)


def test_experts_are_timed_beside_their_products(tmp_path: Path) -> None:
    flags = ["--hidden-size", "8", "--inner-size", "6", "--experts", "5", "--top-k", "2", "--rows", "1,3", "--repeats", "2"]
    result = CliRunner().invoke(mixtures, ["products", *flags, "--out", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["rows"] for row in rows] == [1, 3] and all(row["experts_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert "a row cannot have 6 of 5 experts" in refusal(
        CliRunner().invoke(mixtures, ["products", "--experts", "5", "--top-k", "6"])
    )
