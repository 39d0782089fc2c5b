"""The Markdown tables: their numbers, the paper's beside them, and which cells stay empty."""

from __future__ import annotations

from pathlib import Path

from support.synthetic_sweep import Line, answers, bita, line, stochastic

from benchmarks.reports.tables import tables
from pipedec.bench.report.frames import studies


def document(tmp_path: Path, lines: list[Line]) -> str:
    return tables(studies(answers(tmp_path, lines)))


def table(document: str, heading: str) -> list[dict[str, str]]:
    """The rows of the table under ``heading``, by title."""
    section = document.split(f"## {heading}\n")[1].split("\n## ")[0]
    titles, rule, *body = ([cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines() if row.startswith("|"))
    assert all(set(cell) <= {"-", ":"} for cell in rule)
    return [dict(zip(titles, cells, strict=True)) for cells in body]


COMPARED = [
    line(method, prompt_set, ms=ms * factor, misses=2)
    for method, ms in (("pp", 300.0), ("stpp", 100.0), ("pipedec", 50.0))
    for prompt_set, factor in (("humaneval", 1.0), ("qa", 2.0))
]


def test_methods_are_compared_set_by_set_and_in_the_mean(tmp_path: Path) -> None:
    found = table(document(tmp_path, COMPARED), "paper-14, measured")
    assert [(row["method"], row["prompt set"]) for row in found] == [
        (method, name) for method in ("PP", "STPP", "PipeDec") for name in ("HumanEval", "QA", "mean")
    ]
    pipedec = found[6]
    assert (pipedec["TPOT (ms)"], pipedec["over PP"], pipedec["over STPP"]) == ("50.0", "6.00×", "2.00×")
    assert (pipedec["hit rate"], pipedec["timesteps/token"], pipedec["prompts"]) == ("80.0%", "3.60", "1")
    assert pipedec["over STPP tuned"] == "–" and found[0]["over PP"] == "–" and found[0]["hit rate"] == "–"
    mean = found[8]
    assert (mean["TPOT (ms)"], mean["over PP"], mean["prompts"]) == ("70.7", "6.00×", "2")


def test_the_papers_figures_stand_beside_its_method_on_its_cluster_alone(tmp_path: Path) -> None:
    lines = [*COMPARED, line("pipedec", preset="paper-7", groups=7), line("pipedec", groups=4)]
    found = table(document(tmp_path, lines), "Means over prompt sets, measured")
    papers = {(row["cluster"], row["method"]): row["paper, PipeDec-14"] for row in found if row["paper, PipeDec-14"]}
    assert papers == {("paper-14", "PipeDec"): "6.17× (4.46–7.79×) over PP, 2.53× (2.2–2.69×) over STPP"}
    assert [row["cluster"] for row in found] == ["paper-7", "paper-14", "paper-14", "paper-14", "paper-14, 4 stages"]


def test_measured_stands_beside_computed_latency(tmp_path: Path) -> None:
    lines = [
        line(prompt_index=0, tokens=10, ms=60.0, computed_ms_per_token=50.0, misses=0, overran=0.1),
        line(prompt_index=1, tokens=30, ms=40.0, computed_ms_per_token=40.0, misses=0, overran=0.0),
        line(prompt_index=2, tokens=30, ms=999.0, computed_ms_per_token=None),
        line("pp", clock="computed"),
    ]
    (row,) = table(document(tmp_path, lines), "Measured beside computed latency")
    assert (row["measured TPOT"], row["computed TPOT"], row["measured / computed"]) == ("45.0", "42.5", "1.059")
    assert (row["prompts"], row["timesteps overrun"]) == ("2", "2.5%")
    without = document(tmp_path, [line(clock="computed"), stochastic("pp", clock="computed")])
    assert "Measured beside" not in without and "beside stochastic" not in without


def test_greedy_stands_beside_stochastic_decoding(tmp_path: Path) -> None:
    drawn = [
        stochastic(method, name, repeat=repeat, ms=ms * factor + 10 * repeat, misses=2 + 2 * repeat)
        for method, ms in (("pp", 300.0), ("stpp", 100.0), ("pipedec", 60.0))
        for name, factor in (("humaneval", 1.0), ("qa", 2.0))
        for repeat in (0, 1)
    ]
    plain, both = document(tmp_path, COMPARED), document(tmp_path, [*COMPARED, *drawn])
    found = table(both, "Greedy beside stochastic decoding, measured")
    assert [(row["method"], row["decoding"], row["prompt set"]) for row in found] == [
        (method, way, name)
        for method in ("STPP", "PipeDec") for way in ("greedy", "stochastic") for name in ("HumanEval", "QA", "mean")
    ]  # fmt: skip
    pipedec = found[9]
    assert (pipedec["TPOT (ms)"], pipedec["TPOT of repeats"], pipedec["over STPP"]) == ("65.0", "60.0–70.0", "1.62×")
    assert (pipedec["hit rate"], pipedec["hit rate of repeats"]) == ("70.0%", "60.0%–80.0%")
    assert (pipedec["prompts"], pipedec["repeats"], pipedec["over STPP tuned"]) == ("1", "2", "–")
    assert (found[6]["TPOT (ms)"], found[6]["TPOT of repeats"], found[6]["repeats"]) == ("50.0", "–", "1")
    assert (found[8]["TPOT (ms)"], found[11]["TPOT (ms)"]) == ("70.7", "90.1"), "means are geometric"
    for other in ("paper-14, measured", "Means over prompt sets, measured", "Measured beside computed latency"):
        assert table(both, other) == table(plain, other), "the others are of greedy answers"


def by_line(found: list[dict[str, str]], first: str) -> dict[tuple[str, str], tuple[str, str, str]]:
    return {(row[first], row["quantity"]): (row["QA"], row["mean"], row["paper"]) for row in found}


def test_bita_stands_against_pp_on_every_pipeline(tmp_path: Path) -> None:
    lines = []
    for groups in (1, 14):
        lines += [line("pp", name, groups=groups, ms=300.0, misses=10) for name in ("humaneval", "qa")]
        lines += [bita("humaneval", groups=groups, ms=100.0, misses=5), bita("qa", groups=groups, ms=300 / groups, misses=10)]
    lines.append(bita(prompt_tokens=8, name="other"))
    found = by_line(table(document(tmp_path, lines), "BiTA against PP, measured"), "cluster")
    assert found == {
        ("paper-14, 1 stage", "tokens/pass"): ("1.00", "1.41", ""),
        ("paper-14, 1 stage", "over PP"): ("1.00×", "1.73×", "2.10–3.31×"),
        ("paper-14", "tokens/pass"): ("1.00", "1.41", ""),
        ("paper-14", "over PP"): ("14.00×", "6.48×", "2.10–3.31×"),
    }


def test_bita_is_told_by_prompting_and_by_tree_beside_the_paper(tmp_path: Path) -> None:
    lines = [line("pp", "qa", ms=300.0, misses=10), bita("qa", ms=100.0, misses=4)]
    lines += [bita("qa", name="none", prompting="none", prompt_tokens=0, ms=200.0, misses=5)]
    lines += [bita("qa", shape="full", named=2, ms=150.0, misses=2), bita("qa", shape="full", named=7, ms=300.0, misses=1)]
    found = by_line(table(document(tmp_path, lines), "BiTA by prompting, measured"), "prompting")
    assert found == {
        ("none", "tokens/pass"): ("2.00", "2.00", ""),
        ("none", "over PP"): ("1.50×", "1.50×", "1.94–2.12×"),
        ("deep", "tokens/pass"): ("2.50", "2.50", ""),
        ("deep", "over PP"): ("3.00×", "3.00×", "2.19–2.73×"),
    }
    lines.append(bita("qa", shape="likeliest", named=16, rows=64, ms=75.0))
    by_tree = document(tmp_path, lines)
    found = by_line(table(by_tree, "BiTA by tree, measured"), "tree")
    assert {tree: figures for (tree, figure), figures in found.items() if figure == "over PP"} == {
        "full, k = 2": ("2.00×", "2.00×", "2.02–2.58×"),
        "full, k = 7": ("1.00×", "1.00×", ""),
        "efficient, k = 5": ("3.00×", "3.00×", "2.19–2.73×"),
        "likeliest 64-row, k = 16": ("4.00×", "4.00×", ""),
    }
    section = by_tree.split("## BiTA by tree, measured\n")[1]
    assert "BiTA: deep prompt of 16 tokens, 4 masks trained, 4 used." in section


def test_what_the_rows_do_not_hold_of_bita_has_no_table_and_other_tables_show_one_bita(tmp_path: Path) -> None:
    one = [*COMPARED, bita("qa", ms=100.0), bita("humaneval", ms=200.0)]
    other = bita("qa", name="other", prompt_tokens=8, ms=1.0)
    with_one, with_two = document(tmp_path, one), document(tmp_path, [*one, other, other | {"prompt_index": 3}])
    assert "## BiTA against PP" in with_one and "BiTA by" not in with_one
    assert "BiTA" not in document(tmp_path, COMPARED)
    for heading in ("Means over prompt sets, measured", "paper-14, measured", "Measured beside computed latency"):
        found = table(with_two, heading)
        assert found == table(with_one, heading) and any("BiTA" in row["method"] for row in found)
