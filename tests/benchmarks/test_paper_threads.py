"""The tables of APAR and PASTA from a few made answers, and the positions of PASTA's §6.2."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.papers.__main__ import EXPERIMENTS
from benchmarks.papers.experiment import Place
from benchmarks.papers.positions import FIXED_TOKENS, WAYS
from benchmarks.papers.thread_answers import LIBRARY
from benchmarks.threads.benchmark import SCHEMA
from benchmarks.threads.load import SCHEMA as LOAD
from pipedec.bench.record import ROWS_FILE
from pipedec.core.errors import UserError
from pipedec.directories import reference_threads
from pipedec.threads import ThreadMetrics, bind


def answer(prompt_set: str, dialect: str = "none", method: str = "pp", threads: int = 1, ms: float = 100.0) -> dict[str, Any]:
    """An answer of 21 tokens, half of which are saved where it has several threads."""
    several = threads > 1
    chain, cached, attended = (7, 15, 10.0) if several else (21, 30, 20.0)
    metrics = ThreadMetrics(threads, 21, 21, chain, 21 / chain, attended, 20.0, cached, 30)
    return {
        "schema": SCHEMA, "preset": "paper-14", "cluster": {"stages": 1, "model": "x"}, "dialect": dialect, "method": method,
        "prompt_set": prompt_set, "prompt_index": 0, "anomalies": {}, "prefill_ms": 1.0, "decode_ms": ms, "prompts_ms": 0.0,
        "decoded_text": 20, "timesteps": 20, "hits": 0, "misses": 20, "fill": [[1]], "metrics": asdict(metrics),
        "finish_reason": "stop",
    }  # fmt: skip


def write(place: Place, name: str, rows: list[dict[str, Any]]) -> None:
    place.directory(name).mkdir(parents=True)
    (place.directory(name) / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Answers to two tasks of Vicuna bench and to one of the library; APAR answers all but coding in three threads."""
    made = Place(tmp_path)
    for name, sets in (("apar-vicuna", ("vicuna-generic", "vicuna-coding")), (LIBRARY, ("lists",))):
        rows = []
        for one in sets:
            threads = 1 if one == "vicuna-coding" else 3
            for method, ms in (("pp", 100.0), ("pipedec-bestfirst", 50.0)):
                rows += [answer(one, "none", method, 1, ms), answer(one, "apar", method, threads, ms / threads)]
        write(made, name, rows)
    return made


def tables(name: str, place: Place) -> list[list[list[str]]]:
    return [table.rows for table in EXPERIMENTS[name].tables(place)]


def test_speeds_are_text_tokens_a_second_by_task(place: Place) -> None:
    vicuna, library = tables("apar-fig4", place)
    assert vicuna == [
        ["Generic", "200.0", "600.0 (3.00×)", "400.0 (2.00×)", "1200.0 (6.00×)", "100%"],
        ["Coding", "200.0", "200.0 (1.00×)", "400.0 (2.00×)", "400.0 (2.00×)", "0%"],
        ["all", "200.0", "300.0 (1.50×)", "400.0 (2.00×)", "600.0 (3.00×)", "50%"],
    ]
    assert library[0][0] == "library: lists" and len(library) == 1


def test_threads_and_saved_tokens_stand_beside_the_papers(place: Place) -> None:
    assert tables("apar-table7", place)[0] == [
        ["Generic", "3.0", "1.00", "7.7", "1", "7.7", "1"], ["Coding", "1.0", "0.00", "1", "0", "1", "0"],
        ["all", "2.0", "0.50", "5.1", "0.81", "5.2", "0.82"], ["library: lists", "3.0", "1.00", "–", "–", "–", "–"],
    ]  # fmt: skip
    assert tables("apar-table10", place)[0][0] == ["Generic", "15.0", "30.0", "50.0%", "260.7", "389.2", "33.0%"]
    assert tables("apar-table13", place)[0][2] == ["all", "15.0", "20.0", "25.0%", "170.3", "251.7", "32.4%"]
    assert tables("apar-table2", place)[0] == [
        ["Vicuna bench", "ours", "15.0", "20.0", "25.0%"], ["Vicuna bench", "ours, in several threads", "10.0", "20.0", "50.0%"],
        ["Vicuna bench", "paper, APAR-7B", "166.2", "256.4", "35.2%"],
        ["Vicuna bench", "paper, APAR-13B", "166.6", "255.9", "34.9%"],
        ["questions about the library", "ours", "10.0", "20.0", "50.0%"],
        ["questions about the library", "ours, in several threads", "10.0", "20.0", "50.0%"],
    ]  # fmt: skip
    assert tables("apar-fig6", place)[0][:2] == [
        ["Vicuna bench", "ours", "21.0 (21–21)", "21.0 (21–21)", "+0.0%"],
        ["Vicuna bench", "paper, APAR-7B", "345.5", "344.5", "-0.3%"],
    ]


def test_loads_are_compared_at_equal_memory_and_at_equal_concurrency(place: Place) -> None:
    def load(dialect: str, tokens: int | None, count: int, speed: float) -> dict[str, Any]:
        late = {"mean": 1000 / speed, "p25": 1.0, "p75": 9.0}
        shared = {"schema": LOAD, "dialect": dialect, "kv_tokens": tokens, "concurrency": count}
        return {**shared, "text_tokens_per_s": speed, "latency_ms": late}

    write(place, "apar-memory", [load("none", 512, 16, 10.0), load("apar", 512, 16, 15.0)])
    write(place, "apar-concurrency", [load("none", None, 4, 10.0), load("apar", None, 4, 20.0)])
    assert tables("apar-fig5", place) == [
        [["512", "10.0", "15.0", "+50%"]], [["4", "100 (1–9)", "50 (1–9)", "-50%"]],
    ]  # fmt: skip


def test_speed_ups_of_pasta_are_over_one_thread_by_prompt(place: Place) -> None:
    rows = [answer(one) for one in ("lists", "texts")]
    rows += [answer("lists", "pasta", threads=3, ms=40.0), answer("texts", "pasta", ms=160.0)]
    rows += [answer(one, dialect) for one in ("lists", "texts") for dialect in ("apar", "sot")]
    write(place, "pasta-answers", rows)
    found = tables("pasta-fig4", place)[0]
    assert [row[1:] for row in found if row[0] == "PASTA"] == [
        ["ours", "all, 2", "1.25×", "1.73×", "1.73×", "–"], ["ours", "in several threads, 1", "2.50×", "3.00×", "3.00×", "–"],
    ]  # fmt: skip
    assert tables("pasta-fig7", place)[0][-1] == ["PASTA", "1.56×", "1.25×"]


def test_answers_in_threads_are_not_measured_on_a_cluster_to_launch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured on a cluster that is running: launch it, then give --redis and --run"):
        EXPERIMENTS["apar-fig4"].commands(Place(tmp_path, cluster=("--launch", "cluster.yaml")))
    (command,) = EXPERIMENTS["apar-fig4"].commands(Place(tmp_path, cluster=("--running", "--run", "x")))
    assert command[:4] == ["benchmarks.threads", "--running", "--run", "x"] and "--preset" not in command


def test_every_way_to_state_lengths_is_a_dialect_of_the_shipped_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference_threads() / "target")
    known = bind(WAYS["pred-10x"].dialect, tokenizer.get_vocab().get, lambda token: tokenizer.decode([token])).dialect
    assert known.length_unit == 10 and '" tokens="10"/>' in known.opener_tokens and '" tokens="11"/>' not in known.opener_tokens
    assert WAYS["fixed"].dialect.default_length == FIXED_TOKENS and WAYS["fixed"].dialect.length_pattern is None
    assert len(WAYS["pred-1x"].dialect.opener_tokens) == 10 * (len(known.opener_tokens) - 1) + 1
