"""The table that ``pipedec plan`` prints: what each rank holds, how long it takes, and the expected time per token."""

from __future__ import annotations

from rich import box
from rich.table import Table

from pipedec.hardware import GIGA
from pipedec.plan.partition import Plan

_PROMPT_TOKENS = 1000


def plan_table(plan: Plan) -> Table:
    """One line per rank, in at most 100 columns; expected times and problems are below it. Ranks that lack memory are red."""
    title = f"{plan.partition}: {plan.target} in {plan.dtype}, {len(plan.stages)} stages in {plan.num_groups} groups"
    table = Table(
        title=title, caption=_summary(plan), caption_justify="left", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("rank", justify="right")
    table.add_column("group", justify="right")
    table.add_column("server", overflow="ellipsis", max_width=20, no_wrap=True)
    table.add_column("device", no_wrap=True)
    for heading in ("layers", "weights\nGB", "KV\nGB", "other\nGB", "total /\nmemory GB", "compute\nms", "send\nms"):
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
        f"Expected with {plan.rows} rows per timestep and a KV cache for {plan.max_model_len:,} tokens:",
        f"  timestep             {plan.timestep_ms:7.1f} ms   per token, as long as every token is a hit",
        f"  whole pipeline       {plan.pipeline_ms:7.1f} ms   per miss: one pass through all groups",
        f"  plain pipeline (pp)  {plan.pp_token_ms:7.1f} ms   per token, without speculation",
        f"  first token          {plan.ttft_ms(_PROMPT_TOKENS):7.1f} ms   after a prompt of {_PROMPT_TOKENS:,} tokens",
        f"  knee                 {plan.knee:7,} rows per timestep, at which computing and reading weights take equally long",
        f"  KV capacity          {plan.kv_tokens:7,} tokens of all running requests together",
        *(f"Problem: {problem}" for problem in plan.problems),
    ]
    return "\n".join(lines)
