"""A plan as a table for people."""

from __future__ import annotations

from rich import box
from rich.table import Table

from pipedec.hardware import GIGA
from pipedec.plan.partition import Plan


def plan_table(plan: Plan) -> Table:
    """The plan as a table of at most 100 columns, with the expected times and the problems below it."""
    title = f"{plan.partition}: {plan.target} in {plan.dtype}, {len(plan.stages)} stages in {plan.num_groups} groups"
    table = Table(
        title=title, caption=_summary(plan), caption_justify="left", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("rank", justify="right")
    table.add_column("group", justify="right")
    table.add_column("server", overflow="ellipsis", max_width=20, no_wrap=True)
    table.add_column("device", no_wrap=True)
    for heading in ("layers", "weights\nGB", "KV\nGB", "work\nGB", "total of\nmemory GB", "compute\nms", "send\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in ([plan.draft] if plan.draft else []) + list(plan.stages):
        table.add_row(
            str(row.rank), str(row.group) if row.group else "draft", row.placement.host,
            f"{row.placement.device} #{row.placement.index}", f"{row.layers.start}-{row.layers.stop - 1}",
            *(f"{part / GIGA:.1f}" for part in (row.weight_bytes, row.kv_bytes, row.workspace_bytes)),
            f"{row.total_bytes / GIGA:.1f} / {row.memory_bytes / GIGA:g}", f"{row.compute_ms:.1f}", f"{row.transfer_ms:.2f}",
            style=None if row.fits else "red",
        )  # fmt: skip
    return table


def _summary(plan: Plan) -> str:
    lines = [
        f"Expected, for {plan.rows} rows per timestep and room for {plan.context_tokens:,} tokens of context:",
        f"  timestep             {plan.timestep_ms:7.1f} ms   one token per timestep while predictions hit",
        f"  whole pipeline       {plan.pipeline_ms:7.1f} ms   what a miss costs",
        f"  plain pipeline (pp)  {plan.pp_token_ms:7.1f} ms   per token, for comparison",
        *(f"Problem: {problem}" for problem in plan.problems),
    ]
    return "\n".join(lines)
