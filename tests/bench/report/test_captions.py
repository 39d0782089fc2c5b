"""The words around figures, and the order and looks of methods."""

from __future__ import annotations

from pathlib import Path

from support.synthetic_sweep import answers, line

from pipedec.bench.report.captions import colors, labels, provenance, stages_text
from pipedec.bench.report.frames import variants
from pipedec.bench.report.looks import METHODS, method_looks, method_rank


def test_the_small_print_names_emulation_clock_models_and_counts(tmp_path: Path) -> None:
    lines = [line(prompt_index=index) for index in range(3)] + [line("pp")]
    assert provenance(answers(tmp_path, lines), "bar") == (
        "Emulated (paper-14), 1 CPU machine, slow motion ×4; llama-3.1-70b in float32; "
        "1–3 prompts and 10–30 decoded tokens per bar"
    )
    assert "computed: times by arithmetic" in provenance(answers(tmp_path, [line(clock="computed")]))
    own = line(preset=None, machine={"cpu": "a CPU", "cores": 2, "gpu": "NVIDIA H200"}, slow_motion=1.0)
    here = own | {"cluster": own["cluster"] | {"devices": []}}
    assert provenance(answers(tmp_path, [here])).startswith("Measured on 1 NVIDIA H200 machine, nothing emulated")
    launched = own | {"cluster": own["cluster"] | {"devices": ["rtx3090"] * 2 + ["l40"] * 12}}
    assert provenance(answers(tmp_path, [launched])).startswith("Measured on a cluster of 2 rtx3090 and 12 l40, nothing emulated")


def test_labels_have_what_distinguishes_them(tmp_path: Path) -> None:
    lengths = variants(answers(tmp_path, [line(groups=groups, preset=f"paper-{groups}") for groups in (7, 14)] + [line("pp")]))
    assert labels(lengths) == ["PP", "PipeDec-7", "PipeDec-14"]
    assert stages_text(lengths) == "PP: 14 stages"
    presets = variants(answers(tmp_path, [line(), line(preset="home")]))
    assert labels(presets) == ["PipeDec (home)", "PipeDec (paper-14)"]


def test_methods_keep_order_and_have_different_colours(tmp_path: Path) -> None:
    assert sorted(["zeta", "pipedec", "alpha", "pp", "stpp"], key=method_rank) == ["pp", "stpp", "pipedec", "alpha", "zeta"]
    looks = method_looks(["zeta", "pipedec", "al{}pha"])
    assert looks["pipedec"] is METHODS["pipedec"] and METHODS["pipedec-bestfirst"].name(14) == "PipeDec-14 best-first"
    assert looks["al{}pha"].name(7) == "al{}pha-7"
    everyone = [look.color for look in (*METHODS.values(), looks["zeta"], looks["al{}pha"])]
    assert len(set(everyone)) == len(everyone)
    lengths = variants(answers(tmp_path, [line(groups=groups) for groups in (2, 4, 7)]))
    assert len(set(colors(lengths))) == 3 and colors(lengths[:1]) == [METHODS["pipedec"].color]
