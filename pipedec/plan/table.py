"""The table that ``pipedec plan`` prints: what each rank holds, how long it takes, and the expected time per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipedec.core.errors import UserError
from pipedec.hardware import DEVICES, GIGA
from pipedec.plan.files import NeededFile
from pipedec.plan.partition import Plan
from pipedec.plan.placement import Placement
from pipedec.plan.speeds import speed_of
from pipedec.plan.state_memory import NO_STATES

_PROMPT_TOKENS = 1000
_EXPERT_ROWS = (1, 4, 16, 64)
_KNEE = "rows per timestep, up to which a further row costs nothing", "row per timestep: every further row reads more experts"
_REQUEST_TOKENS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)


def plan_table(plan: Plan, draft_top1: float | None = None) -> Group:
    """One line per rank, in at most 100 columns; expected times and problems are below it. Ranks that lack memory are red.

    ``draft_top1`` as in ``Plan.default_method_ms``. Raises UserError if it is given for a plan without a draft.
    """
    if plan.draft is None and draft_top1 is not None:
        raise UserError(f"partition {plan.partition} has no draft: name one (draft:) and its device (draft_device:)")
    title = f"{plan.partition}: {plan.target} in {plan.numbers}, {len(plan.stages)} stages in {plan.num_groups} groups"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("rank", justify="right")
    table.add_column("group", justify="right")
    table.add_column("server", overflow="ellipsis", max_width=20, no_wrap=True)
    table.add_column("device", no_wrap=True)
    kept = "KV\nGB" if plan.states == NO_STATES else "KV,\nstates"
    for heading in ("layers", "weights\nGB", kept, "other\nGB", "total /\nusable GB", "compute\nms", "send\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in ([plan.draft] if plan.draft else []) + list(plan.stages):
        device = f"{row.placement.device} #{row.placement.index}{' *' if row.shared else ''}"
        table.add_row(
            str(row.rank), str(row.group) if row.group else "draft", row.placement.host,
            device, f"{row.layers.start}-{row.layers.stop - 1}",
            *(f"{part / GIGA:.1f}" for part in (row.weight_bytes, row.kv_bytes + row.state_pool_bytes, row.workspace_bytes)),
            f"{row.total_bytes / GIGA:.1f} / {row.memory_bytes / GIGA:.1f}", f"{row.compute_ms:.1f}", f"{row.transfer_ms:.2f}",
            style=None if row.fits else "red",
        )  # fmt: skip
    problems = [f"Problem: {problem}" for problem in plan.problems]
    return Group(table, Text("\n".join([*_summary(plan, plan.default_method_ms(draft_top1)), *problems])))


def files_table(hosts: Collection[str], files: Sequence[NeededFile]) -> Group:
    """One line per host and file, and what each host needs together."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("host", "checkpoint", "file"):
        table.add_column(heading, overflow="fold")
    table.add_column("GB", justify="right", no_wrap=True)
    table.add_column("also on", overflow="fold")
    lines = []
    for host in hosts:
        needed = [file for file in files if host in file.hosts]
        for file in needed:
            others = ", ".join(other for other in file.hosts if other != host)
            table.add_row(host, file.key, file.path.name, _size([file]), others)
        lines.append(f"{host}: {len(needed)} files, {_size(needed)} GB")
    return Group(
        table, Text("\n".join([*lines, "Every host needs the configuration, tokenizer and index of each checkpoint, too."]))
    )


def _size(files: Sequence[NeededFile]) -> str:
    """Their GB, if they are on this machine."""
    sizes = [file.num_bytes for file in files if file.num_bytes is not None]
    return f"{sum(sizes) / GIGA:.2f}" if len(sizes) == len(files) else "?"


def _summary(plan: Plan, drafted_ms: float | None) -> list[str]:
    """Lines of at most 100 columns."""
    sharing = [
        f"* Rank 0 and stage {plan.shared_stage} share this device. Its memory is divided so that both hold the same tokens;",
        "  ms are of each alone, and a timestep counts with their sum.",
        "",
    ]
    most = plan.kv.max_num_seqs if plan.states == NO_STATES else min(plan.kv.max_num_seqs, plan.states.states)
    sizes = sorted(plan.kv.tokens * rank.token_bytes / GIGA for rank in plan.kv.ranks)
    kv_gb = f"{sizes[0]:.1f}" if sizes[0] == sizes[-1] else f"{sizes[0]:.1f} to {sizes[-1]:.1f}"
    parts = Counter[Placement]()  # bytes of the ranks that share a GPU
    for rank in [*([plan.draft] if plan.draft else []), *plan.stages]:
        parts[rank.placement] += rank.memory_bytes
    left = {place.device: DEVICES[place.device].memory_bytes - used for place, used in parts.items()}
    reserve = ", ".join(f"{size / GIGA:.1f} GB of each {name}" for name, size in left.items() if DEVICES[name].is_gpu)
    return [
        *([] if plan.shared_stage is None else sharing),
        f"Expected with {plan.rows} rows per timestep:",
        f"  timestep             {plan.timestep_ms:7.1f} ms   per token, as long as every token is a hit",
        *_with_more_rows(plan),
        f"  whole pipeline       {plan.timestep_ms * plan.passage:7.1f} ms   per miss: one passage",
        *_in_flight(plan),
        f"  plain pipeline (pp)  {plan.tpot_ms:7.1f} ms   per token, without speculation",
        *([] if drafted_ms is None else [f"  default method       {drafted_ms:7.1f} ms   per token, estimated"]),
        f"  first token          {plan.ttft_ms(_PROMPT_TOKENS):7.1f} ms   of a prompt of {_PROMPT_TOKENS:,} tokens",
        f"  knee                 {plan.knee:7,} {_KNEE[plan.has_experts]}",
        f"  KV capacity          {plan.kv.tokens:7,} tokens of all running requests together, {kv_gb} GB per rank",
        *_states(plan),
        *([f"  GPU memory reserve   {reserve}"] if reserve else []),
        *_speeds(plan),
        "",
        f"Requests that have memory at the same time ({most:,} may run, of up to {plan.max_model_len:,} tokens):",
        _line("tokens of each", [f"{tokens:,}" for tokens in _REQUEST_TOKENS]),
        _line("requests", [f"{plan.kv.requests(tokens):,}" for tokens in _REQUEST_TOKENS]),
    ]


def _with_more_rows(plan: Plan) -> list[str]:
    """A line about a timestep of other numbers of rows: as many as there is room for, or, with experts, several."""
    if plan.has_experts:
        shown = ", ".join(f"{rows}: {plan.timestep_with(rows):.1f}" for rows in _EXPERT_ROWS)
        return [f"  timestep by rows     {shown} ms; prompts enter by {plan.room}"]
    hop_ms = max(stage.timing.send_ms(plan.room) for stage in plan.stages)
    rows = f"  timestep, {plan.room} rows"
    return [
        f"{rows:<21}  {plan.timestep_with(plan.room):7.1f} ms   as many as the default method sends, a hop in {hop_ms:.1f} ms"
    ]


def _states(plan: Plan) -> list[str]:
    """A line about the states of recurrent layers, if the target has any."""
    if plan.states == NO_STATES:
        return []
    sizes = [stage.state_pool_bytes / GIGA for stage in plan.stages]
    return [
        f"  states               {plan.states.states:7,} of running requests, {plan.states.snapshots:,} after prefixes; "
        f"rows in flight: {plan.states.rows:,}",
        f"{'':<30}in all {min(sizes):.1f} to {max(sizes):.1f} GB per rank",
    ]


def _speeds(plan: Plan) -> list[str]:
    """For each device, whether its times are measured or a data sheet's."""
    ranks = [*([plan.draft] if plan.draft else []), *plan.stages]
    names = dict.fromkeys(rank.placement.device for rank in ranks)
    found = [f"{name}: {speed_of(name).source}" for name in names]
    return [f"  {title:<21}{line}" for title, line in zip(["times", *[""] * len(found)], found, strict=False)]


def _in_flight(plan: Plan) -> list[str]:
    """Lines about latencies: of a passage that is longer than there are groups, and of hosts in another order than listed."""
    ring_ms, lines = plan.ring_us / 1000, []
    if (on_links := plan.passage - plan.num_groups) > 0:
        lines.append(f"  passage              {plan.passage:7} timesteps in flight, of which {on_links} are on links")
    if plan.passage > plan.num_groups or plan.listed_us is not None:
        lines.append(f"  latency              {ring_ms:7.1f} ms   around the ring, one way over every link")
    if plan.listed_us is not None:
        hosts = ", ".join(dict.fromkeys(stage.placement.host for stage in plan.stages))
        lines.append(f"  order of hosts       {hosts}: as the file lists them, {plan.listed_us / 1000:.1f} ms around the ring")
    return lines


def _line(name: str, values: list[str]) -> str:
    return f"  {name:<17}" + "".join(f"{value:>9}" for value in values)
