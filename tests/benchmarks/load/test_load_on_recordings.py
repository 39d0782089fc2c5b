"""Load on recorded answers at toy size, in computed time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.refusals import refusal
from support.tiny_pair import SENTENCES, Pair

from benchmarks.load.__main__ import load

pytestmark = pytest.mark.slow


def bench(pair: Pair | None, out: Path, *flags: str, prompts: Sequence[str] = SENTENCES[:3]) -> Result:
    models = [] if pair is None else ["--target", str(pair.target), "--draft", str(pair.draft)]
    asked = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    return CliRunner().invoke(load, [*models, *asked, "--raw-prompt", "--out", str(out), *flags])


def replay(pair: Pair, folder: Path, *flags: str, prompts: Sequence[str] = SENTENCES[:3]) -> list[dict[str, Any]]:
    where = ["--preset", "paper-14", "--stages", "3", "--recording", str(folder / "recording"), "--no-own-work"]
    done = bench(pair, folder / "out", *where, "--max-tokens", "6", *flags, prompts=prompts)
    assert done.exit_code == 0, (done.output, done.exception)
    return [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()]


def test_every_method_gets_every_load(pair: Pair, tmp_path: Path) -> None:
    rows = replay(
        pair, tmp_path, "--method", "pp,stpp", "--method", "pipedec:width=4", "--concurrency", "1,4", "--goodput", "ttft:100000"
    )
    assert [(row["pattern"]["concurrency"], row["policy"]) for row in rows] == [
        (load, policy) for load in (1, 4) for policy in ("pp", "stpp", "pipedec:width=4")
    ]
    for row in rows:
        assert row["schema"] == "pipedec.load/1" and row["clock"] == "computed" and row["cluster"]["stages"] == 3
        assert row["requests"] == len(row["served"]) == 4 * row["pattern"]["concurrency"]
        assert row["output_tokens"] == sum(tokens for one in row["served"] for _, tokens in one["events"])
        assert row["goodput_per_s"] == pytest.approx(row["requests"] / row["makespan_s"], abs=1e-4)
        assert row["rows_per_timestep"] > 0 and row["timesteps"] > 0
    alone, together = rows[0], rows[3]
    assert alone["tokens_per_timestep"] == pytest.approx(1 / 3, abs=0.02), "pp alone: one token per pass"
    assert together["tokens_per_s"] > 1.5 * alone["tokens_per_s"], "plain continuous batching"
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"rows.jsonl", "load.png", "load.svg", "fill.png", "fill.svg"}


def test_one_after_the_other_waits_in_the_queue(pair: Pair, tmp_path: Path) -> None:
    flags = ("--method", "pp", "--concurrency", "4", "--requests", "4", "--max-num-seqs", "4,1")
    together, in_turn = replay(pair, tmp_path, *flags)
    assert together["queue_ms"]["mean"] < together["ttft_ms"]["mean"] < in_turn["queue_ms"]["mean"]
    assert together["e2e_ms"]["mean"] < in_turn["e2e_ms"]["mean"]
    ends = [one["ended"] for one in in_turn["served"]]
    assert ends == sorted(ends)


def test_an_intruder_comes_when_the_others_have_begun(pair: Pair, tmp_path: Path) -> None:
    (row,) = replay(pair, tmp_path, "--method", "pp", "--concurrency", "3", "--max-tokens", "12", "--intruder", "150")
    assert row["requests"] == 3 and row["intruder"]["prompt_tokens"] == 150
    assert row["intruder"]["ttft_ms"] > 0 and 1 <= row["intruder"]["ratio"] < 10


def test_conversations_go_on_token_for_token(pair: Pair, tmp_path: Path) -> None:
    """What the first turn has computed, the second one does not compute again."""
    flags = ("--method", "pp", "--concurrency", "2", "--requests", "3", "--turns", "3")
    prompts = [f"{letter} {SENTENCES[number % 3]}" for number, letter in enumerate("ABCDEFGHI")]
    (row,) = replay(pair, tmp_path, *flags, prompts=prompts)
    _, computed = replay(pair, tmp_path, *flags, "--no-prefix-cache", prompts=prompts)
    assert row["requests"] == 9 and [turn["turn"] for turn in row["turns"]] == [1, 2, 3]
    assert row["turns"][0]["cached_tokens"] == 0
    for before, turn in pairwise(row["turns"]):
        answered = [tokens_of(one) for one in row["served"] if one["turn"] == before["turn"]]
        history = before["prompt_tokens"] + sum(answered) - len(answered)  # the last token of an answer is not computed
        assert turn["cached_tokens"] == history and turn["prefilled_tokens"] == turn["prompt_tokens"] - history
    assert computed["cached_tokens"] == 0 and computed["prompt_tokens"] == row["prompt_tokens"]
    assert computed["turns"][2]["ttft_timesteps"] >= row["turns"][2]["ttft_timesteps"]


def tokens_of(served: dict[str, Any]) -> int:
    return sum(tokens for _, tokens in served["events"])


def test_a_load_beyond_the_memory_pauses_and_answers_everybody(pair: Pair, tmp_path: Path) -> None:
    flags = ("--method", "pp", "--concurrency", "6", "--requests", "12", "--max-tokens", "40", "--random", "30")
    short, ample = (
        replay(pair, tmp_path / name, *flags, "--kv-tokens", tokens, prompts=())[0]
        for name, tokens in (("s", "288"), ("a", "9999"))
    )
    assert short["refused"] == 0 and short["output_tokens"] == ample["output_tokens"]
    assert short["kv"]["capacity_slots"] == 288 and short["kv"]["peak_slots"] <= 288 < ample["kv"]["peak_slots"]
    assert short["makespan_s"] > ample["makespan_s"]
    flags = ("--method", "pp", "--concurrency", "2", "--random", "70", "--kv-tokens", "64")
    (never,) = replay(pair, tmp_path / "n", *flags, prompts=())
    assert never["refused"] == never["requests"] == 8 and "64" in never["served"][0]["refused"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "2", "--intruder", "9"], "--intruder needs a fixed number of others"),
        (["--concurrency", "2", "--turns", "2", "--intruder", "9"], "leave out --turns"),
        (["--concurrency", "2"], "give --recording DIR"),
        ([], "no load: give --concurrency N or --rate R"),
        (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
        (["--concurrency", "2", "--goodput", "itl:3"], "--goodput itl:3: write ttft:MS or tpot:MS"),
        (["--concurrency", "2", "--kv-tokens", "9"], "--kv-tokens must be at least 16, one block, not 9"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    assert message in refusal(bench(None, tmp_path, "--preset", "paper-14", *flags))
