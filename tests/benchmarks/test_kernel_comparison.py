"""Own kernels beside torch, and a draft's forwards, at toy size: what is counted, that both sides agree, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.kernels import comparison
from benchmarks.kernels.__main__ import kernels
from benchmarks.kernels.comparison import CASES, Case, Compared, ComparisonConfig, Size, compare_kernels
from benchmarks.kernels.drafting import DraftingConfig
from pipedec.core.errors import UserError
from pipedec.core.limits import MAX_FORWARDS
from pipedec.families.llama import LlamaConfig
from pipedec.model.kernels import language


def run(tmp_path: Path, *flags: str) -> tuple[str, list[dict[str, object]]]:
    """The output of a command, and its rows."""
    out = tmp_path / "figures.jsonl"
    done = CliRunner().invoke(kernels, [*flags, "--device", "cpu", "--repeats", "1", "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout, [json.loads(line) for line in out.read_text().splitlines()]


def test_every_kernel_has_a_case() -> None:
    """The name of a case begins with that of the file which launches the kernel."""
    paths = Path(language.__file__).parent.glob("*.py")
    files = {path.stem for path in paths if "language.launch(" in path.read_text(encoding="utf-8")}
    assert files == {case.name.split()[0] for case in CASES}


@pytest.mark.usefixtures("tiny")
def test_kernels_stand_beside_torch_s_way(tmp_path: Path) -> None:
    """Computed by torch here too, or in the interpreter where the process has it."""
    text, rows = run(tmp_path, "compare", "--model", "tiny", "--rows", "1,3", "--past", "4,9")
    computed_by = "kernels in the interpreter" if language.IS_INTERPRETED else "torch"
    assert f"Computed by {computed_by}." in " ".join(text.split()) and {row["computed_by"] for row in rows} == {computed_by}
    assert language.devices <= {"cuda"}, "afterwards torch computes on the CPU again"
    assert [(row["operation"], row["past"], row["rows"]) for row in rows[:4]] == [
        ("tree_attention", past, count) for past in (4, 9) for count in (1, 3)
    ]
    assert {row["operation"] for row in rows} == {case.name for case in CASES}
    for row in rows:
        bound_us = 1e6 * row["bytes"] / row["roofline"]["bytes_per_second"]  # type: ignore[index, operator]
        for share, time in (("share_of_bandwidth", "time_us"), ("torch_share", "torch_time_us")):
            assert row[share] == pytest.approx(bound_us / row[time]["median"])  # type: ignore[index]
        assert row["difference"] < 1e-5, "both compute the same"  # type: ignore[operator]
    assert rows[3]["bytes"] == 4 * 2 * 8 * ((9 + 3) * 2 + 3 * 4), "keys and values, queries and results"


@pytest.mark.usefixtures("tiny")
def test_only_some_kernels_are_measured_and_others_after_one_past(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[Size]()

    def compared(size: Size) -> Compared:
        sizes.append(size)
        return Compared(1000, lambda copies: (lambda copy: torch.ones(copies), lambda copy: torch.ones(copies)))

    monkeypatch.setattr(comparison, "CASES", (*CASES, Case("matmul w4a16", compared)))
    config = ComparisonConfig(model="tiny", rows=(1, 2), past=(9, 4), only=("matmul w4a16",), device="cpu", repeats=1)
    rows = compare_kernels(config)
    assert [(row["operation"], row["past"], row["rows"], row["copies"]) for row in rows] == [
        ("matmul w4a16", None, count, 1) for count in (1, 2)
    ]
    assert [size.past for size in sizes] == [4, 4]


def test_a_draft_s_forwards_are_counted_in_timesteps(tmp_path: Path, tiny: LlamaConfig) -> None:
    flags = "--draft", "tiny", "--model", "tiny", "--layers", "1", "--rows", "1,3", "--past", "9"
    text, (step, *rows) = run(tmp_path, "draft", *flags, "--dtype", "float32")
    assert "per timestep" in " ".join(text.split()) and step["operation"] == "timestep" and step["rows"] == 16
    assert [row["rows"] for row in rows] == [1, 3]
    for row in rows:
        fit = int(step["time_us"]["median"] / row["time_us"]["median"])  # type: ignore[index]
        assert row["per_timestep"] == min(MAX_FORWARDS, fit)
        cached = 2 * (9 + row["rows"]) * tiny.cache_values_per_token  # type: ignore[operator]
        assert row["bytes"] == 4 * (2 * tiny.layer_parameters + 100 * 32 + cached), "layers, head, keys and values"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ComparisonConfig(model="gpt-2"), "unknown model 'gpt-2'"),
        (lambda: ComparisonConfig(only=("gemm",)), "unknown kernel 'gemm': choose one of tree_attention"),
        (lambda: ComparisonConfig(rows=()), r"rows: must be a list \(not empty\)"),
        (lambda: DraftingConfig(model="gpt-2"), "unknown model 'gpt-2'"),
        (lambda: DraftingConfig(draft="gpt-oss-20b").draft_shape, "gpt-oss-20b: not made of pipedec's own parts"),
        (lambda: DraftingConfig(layers=0), "layers: must be an integer"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(make: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()  # type: ignore[operator]
