"""Lines of measured figures as text, for model cards and for the tables that commands print."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def bita_cells(row: Row) -> list[str]:
    """Top 1, top 5 and loss of each mask; tokens per pass of chain and tree; groups."""
    shares = [" ".join(f"{share:.1%}" for share in row[key]) for key in ("top1", "top5")]
    loss = " ".join(f"{loss:.2f}" for loss in row["loss"])
    return [*shares, loss, f"{row['chain_tokens']:.2f}", f"{row['tree_tokens']:.2f}", f"{row['groups']:,}"]


def top_k_cells(row: Row) -> list[str]:
    """Top 1, top 4 and top 16."""
    return [f"{row[key]:.1%}" for key in ("top1", "top4", "top16")]


def change_cells(before: Row, after: Row) -> list[str]:
    """Top 1, top 4 and top 16, before → after; tokens."""
    changes = zip(top_k_cells(before), top_k_cells(after), strict=True)
    return [*(f"{old} → {new}" for old, new in changes), f"{after['tokens']:,}"]


def loss_cells(row: Row) -> list[str]:
    """Loss and tokens of text, then of control tokens; the latter are empty if there are none."""
    control = [f"{row['control_loss']:.3f}", f"{row['control_tokens']:,}"] if "control_loss" in row else ["", ""]
    return [f"{row['loss']:.3f}", f"{row['tokens']:,}", *control]


def answer_cells(row: Row) -> list[str]:
    """Figures of answers in threads (``thread_figures``); with their quality, if a judge rated them."""
    means = (f"{row[name]:.1f}" for name in ("threads", "tokens", "longest_chain"))
    ratios = (f"{row[name]:.2f}" for name in ("parallelism", "speedup"))
    quality = [f"{row['quality']:.2f}", f"{row['win_rate']:.0%}"] if "quality" in row else []
    ends = (f"{row[name]:.0%}" for name in ("finished", "circles"))
    return [str(row["answers"]), f"{row['forked']:.0%}", *means, *ratios, *ends, *quality]
