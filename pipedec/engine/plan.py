"""What a partition will cost before anything is started: layers, memory and times of every stage.

Owns the split of layers over stages (even, explicit or balanced) and the arithmetic of a plan. It measures nothing and
starts nothing: a stage is memory-bound or compute-bound by its device's data sheet, a transfer is latency plus bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from pipedec.config import ClusterConfig, DeviceConfig, PartitionConfig, model_shape
from pipedec.core import UserError
from pipedec.hardware import DEVICES, DTYPE_BYTES, GIGA, LINKS, Link, ModelShape, PassTime
from pipedec.scheduler.workflow import Topology

# The CUDA context with its libraries, and the rows of a prompt that prefill sends at once.
FIXED_WORKSPACE_BYTES = 500_000_000
PREFILL_ROWS = 512
# What the draft sends for one row: token id and parent.
ROW_BYTES = 16


@dataclass(frozen=True)
class Placement:
    """One device: ``index`` counts the devices of the host in the order of the configuration."""

    host: str
    device: str
    index: int


@dataclass(frozen=True)
class RankTiming:
    """How long one rank computes and sends, by its device's and its link's data sheets.

    Attributes:
        compute: one pass through its layers.
        link: the connection to the next rank; from the last stage, to rank 0.
        row_bytes: what it sends for one row; 0 from the last stage, which sends a verdict.
    """

    compute: PassTime
    link: Link
    row_bytes: int

    def compute_ms(self, rows: int) -> float:
        return self.compute.ms(rows)

    def send_ms(self, rows: int) -> float:
        return self.link.transfer_ms(rows * self.row_bytes)


@dataclass(frozen=True)
class StagePlan:
    """What one rank holds and how long it takes. Rank 0 is the draft (group 0), stages are ranks 1..n.

    Attributes:
        group: the group G_i of the stage, from 1.
        layers: transformer layers, counted from 0.
        weight_bytes, kv_bytes, workspace_bytes: the memory it needs; KV for the context and the rows of the tree.
        memory_bytes: the memory the device has.
        timing: how long it computes and sends, for any number of rows.
        rows: rows of a full tree layer.
        compute_ms: one pass of so many rows through the stage.
        transfer_ms: sending its output: rows to the next rank, the verdict from the last one.
    """

    rank: int
    placement: Placement
    group: int
    layers: range
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    memory_bytes: int
    timing: RankTiming
    rows: int

    @property
    def compute_ms(self) -> float:
        return self.timing.compute_ms(self.rows)

    @property
    def transfer_ms(self) -> float:
        return self.timing.send_ms(self.rows)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.memory_bytes


@dataclass(frozen=True)
class Plan:
    """A partition with its expected times.

    Attributes:
        rows: rows per timestep, the tree's width.
        draft: rank 0; None without a draft model.
        timestep_ms: the slowest group (or the draft), then the slowest transfer between groups (paper §3.1).
        pipeline_ms: one token through all groups, timestep by timestep: what a miss costs.
        pp_token_ms: plain pipeline parallelism, for comparison: one row through every stage and the token back.
        problems: why the plan cannot run, in whole sentences; empty when it can.
    """

    partition: str
    target: str
    dtype: str
    context_tokens: int
    rows: int
    draft: StagePlan | None
    stages: tuple[StagePlan, ...]
    timestep_ms: float
    pipeline_ms: float
    pp_token_ms: float
    problems: tuple[str, ...]

    @property
    def num_groups(self) -> int:
        return self.stages[-1].group


def even_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as equal as can be; the front stages take the remainder. UserError for too many stages."""
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    if stages < 1:
        raise UserError(f"stages must be at least 1, not {stages}")
    size, longer = divmod(num_layers, stages)
    starts = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def explicit_layers(counts: Sequence[int], num_layers: int) -> list[range]:
    """The layers of each stage from their numbers. UserError unless they are positive and add up to ``num_layers``."""
    if any(count < 1 for count in counts):
        raise UserError("every stage needs at least 1 layer")
    if sum(counts) != num_layers:
        raise UserError(f"layers sum to {sum(counts)}, the target has {num_layers}")
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def balance(num_layers: int, layer_ms: Sequence[float], extra_ms: Sequence[float], room: Sequence[int]) -> list[int]:
    """The number of layers of each stage that makes the slowest stage as fast as it can be, at least 1 each.

    Stage i takes ``extra_ms[i] + layers · layer_ms[i]`` and holds at most ``room[i]`` layers. Each further layer goes to the
    stage that is fastest with it (the first of equals). This is exact: the layers so placed are the cheapest of all
    (stage, how many) steps, so no other split has a lower maximum. UserError when the layers do not fit.
    """
    stages = len(layer_ms)
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    for stage, layers in enumerate(room, start=1):
        if layers < 1:
            raise UserError(f"stage {stage} has no room for a single layer")
    if sum(room) < num_layers:
        raise UserError(f"the {stages} stages have room for {sum(room)} layers, the target has {num_layers}")
    counts = [1] * stages
    queue = [(extra_ms[stage] + 2 * layer_ms[stage], stage) for stage in range(stages) if room[stage] > 1]
    heapq.heapify(queue)
    for _ in range(num_layers - stages):
        _, stage = heapq.heappop(queue)
        counts[stage] += 1
        if counts[stage] < room[stage]:
            heapq.heappush(queue, (extra_ms[stage] + (counts[stage] + 1) * layer_ms[stage], stage))
    return counts


def plan(config: ClusterConfig, partition_name: str | None = None) -> Plan:
    """The plan of one partition of ``config``. What does not fit is listed in ``problems``; mistakes are UserErrors."""
    name, partition = config.find_partition(partition_name)
    target = model_shape(config.target)
    draft_place, places = place_stages(config, name, partition)
    costs = _Costs(target, config.dtype, config.tree.with_defaults().width, config.context_tokens, partition.num_groups)
    layers, problems = _split(costs, partition, places)
    topology = Topology.even(partition.stages, partition.num_groups)
    stages = tuple(
        _plan_stage(costs, config, rank, topology.group_of(rank) + 1, layers, places) for rank in range(1, partition.stages + 1)
    )
    draft = _plan_draft(config, costs, draft_place, places[0]) if draft_place else None
    advice = "use more stages or bfloat16" if config.dtype == "float32" else "use more stages"
    for stage in stages:
        if not stage.fits:
            problems.append(f"stage {stage.rank} {_shortage(stage)}: {advice}")
    if draft and not draft.fits:
        problems.append(f"the draft {_shortage(draft)}: use a larger device or a smaller draft")
    timestep = _timestep_ms(draft, stages)
    return Plan(
        name, config.target, config.dtype, config.context_tokens, config.tree.with_defaults().width, draft, stages, timestep,
        timestep * partition.num_groups, _pp_token_ms(stages), tuple(problems),
    )  # fmt: skip


def place_stages(config: ClusterConfig, name: str, partition: PartitionConfig) -> tuple[Placement | None, list[Placement]]:
    """The devices of the draft (None without a draft model) and of stages 1..n. UserError when there are too few.

    The draft takes the last device of its kind on its host, so that stages keep the front ones.
    """
    free = [
        Placement(server.host, device, index)
        for server in config.servers
        for index, device in enumerate(device for device, count in server.devices.items() for _ in range(count))
    ]
    draft = None
    if config.draft != "none":
        if partition.draft_device is None:
            raise UserError(f"partitions.{name}.draft_device: missing: the draft model needs a device (or set draft: none)")
        draft = _take(free, partition.draft_device, f"partitions.{name}.draft_device", last=True)
    if partition.devices:
        wanted = [entry for entry in partition.devices for _ in range(entry.count)]
        places = [_take(free, entry, f"partitions.{name}.devices") for entry in wanted]
    else:
        hosts = partition.servers or tuple(server.host for server in config.servers)
        places = [place for host in hosts for place in free if place.host == host]
    if len(places) < partition.stages:
        raise UserError(f"partitions.{name}.stages: {partition.stages} stages need as many devices, but {len(places)} are free")
    return draft, places[: partition.stages]


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


@dataclass(frozen=True)
class _Costs:
    """Bytes and milliseconds of the target's parts."""

    shape: ModelShape
    dtype: str
    rows: int
    context_tokens: int
    groups: int

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_kv_bytes(self) -> int:
        """Past and tree cache of one layer: the context, and a tree layer per group with the one that enters."""
        slots = self.context_tokens + self.rows * (self.groups + 1)
        return slots * self.shape.cache_values_per_token * self.element_bytes

    @property
    def workspace_bytes(self) -> int:
        """What a stage needs besides weights and caches: fixed part, activations of a prefill chunk, one row of logits each."""
        width = 4 * self.shape.hidden_size + 3 * self.shape.intermediate_size
        values = max(self.rows, PREFILL_ROWS) * width + self.rows * self.shape.vocab_size
        return FIXED_WORKSPACE_BYTES + values * self.element_bytes

    def extra_parameters(self, first: bool, last: bool) -> int:
        """Weights besides layers: embedding on the first stage, norm and head on the last; a tied head needs both apart."""
        embedding, norm = self.shape.embedding_parameters, self.shape.hidden_size
        shared = first and last and self.shape.tie_word_embeddings
        return embedding * (first + last - shared) + norm * last

    def read_parameters(self, layers: int, last: bool) -> int:
        """Weights that one pass reads: of the embedding only a few rows, so it does not count."""
        return layers * self.shape.layer_parameters + last * (self.shape.embedding_parameters + self.shape.hidden_size)

    def room(self, device: str, first: bool, last: bool) -> int:
        """How many layers fit on a device beside everything else."""
        other = self.extra_parameters(first, last) * self.element_bytes + self.workspace_bytes
        layer = self.shape.layer_parameters * self.element_bytes + self.layer_kv_bytes
        return max(0, (DEVICES[device].memory_bytes - other) // layer)


def _split(costs: _Costs, partition: PartitionConfig, places: Sequence[Placement]) -> tuple[list[range], list[str]]:
    """The layers of each stage, and what is wrong with them: when nothing fits, the balance ignores memory."""
    num_layers, stages = costs.shape.num_hidden_layers, partition.stages
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    if partition.layers != "auto":
        return explicit_layers(partition.layers, num_layers), []
    ends = [(stage == 0, stage == stages - 1) for stage in range(stages)]
    devices = [DEVICES[place.device] for place in places]
    layer_ms = [device.pass_time(costs.read_parameters(1, False), 1, costs.dtype).ms(costs.rows) for device in devices]
    extra_ms = [
        device.pass_time(costs.read_parameters(0, last), 0, costs.dtype).ms(costs.rows)
        for device, (_, last) in zip(devices, ends, strict=True)
    ]
    room = [costs.room(device.name, *end) for device, end in zip(devices, ends, strict=True)]
    try:
        return explicit_layers(balance(num_layers, layer_ms, extra_ms, room), num_layers), []
    except UserError as error:
        anyhow = balance(num_layers, layer_ms, extra_ms, [num_layers] * stages)
        return explicit_layers(anyhow, num_layers), [str(error)]


def _plan_stage(
    costs: _Costs, config: ClusterConfig, rank: int, group: int, layers: Sequence[range], places: Sequence[Placement]
) -> StagePlan:
    first, last = rank == 1, rank == len(places)
    count, place = len(layers[rank - 1]), places[rank - 1]
    device = DEVICES[place.device]
    parameters = count * costs.shape.layer_parameters + costs.extra_parameters(first, last)
    timing = RankTiming(
        device.pass_time(costs.read_parameters(count, last), count, costs.dtype),
        _link(config, place, None if last else places[rank]),
        0 if last else costs.shape.hidden_size * costs.element_bytes,
    )
    return StagePlan(
        rank, place, group, layers[rank - 1], parameters * costs.element_bytes, count * costs.layer_kv_bytes,
        costs.workspace_bytes, device.memory_bytes, timing, costs.rows,
    )  # fmt: skip


def _plan_draft(config: ClusterConfig, target: _Costs, place: Placement, first_stage: Placement) -> StagePlan:
    costs = _Costs(model_shape(config.draft), target.dtype, target.rows, target.context_tokens, target.groups)
    device, layers = DEVICES[place.device], costs.shape.num_hidden_layers
    timing = RankTiming(
        device.pass_time(costs.read_parameters(layers, True), layers, costs.dtype), _link(config, place, first_stage), ROW_BYTES
    )
    return StagePlan(
        0, place, 0, range(layers), costs.shape.parameters * costs.element_bytes, layers * costs.layer_kv_bytes,
        costs.workspace_bytes, device.memory_bytes, timing, costs.rows,
    )  # fmt: skip


def _take(free: list[Placement], wanted: DeviceConfig, path: str, last: bool = False) -> Placement:
    found = [place for place in free if (place.host, place.device) == (wanted.host, wanted.device)]
    if not found:
        raise UserError(f"{path}: no free {wanted.device} is left on {wanted.host}")
    chosen = found[-1 if last else 0]
    free.remove(chosen)
    return chosen


def _link(config: ClusterConfig, source: Placement, target: Placement | None) -> Link:
    """The connection of two devices; ``target`` None is rank 0, which the verdict may have to reach over the network."""
    if target is not None and source.host == target.host:
        return LINKS[config.network.within_server]
    return Link("between servers", config.network.latency_us, config.network.bandwidth_gbps / 8, "network: of the configuration")


def _timestep_ms(draft: StagePlan | None, stages: Sequence[StagePlan]) -> float:
    """Slowest group, its own transfers included, or the draft; then the slowest transfer that leaves a group."""
    group_ms: dict[int, float] = {0: draft.compute_ms} if draft else {}
    leaving = [draft.transfer_ms] if draft else []
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        inside = following is not None and following.group == stage.group
        group_ms[stage.group] = group_ms.get(stage.group, 0.0) + stage.compute_ms + (stage.transfer_ms if inside else 0.0)
        if not inside:
            leaving.append(stage.transfer_ms)
    return max(group_ms.values()) + max(leaving)


def _pp_token_ms(stages: Sequence[StagePlan]) -> float:
    """One row through every stage, and the token back to rank 0."""
    return sum(stage.timing.compute_ms(1) + stage.timing.send_ms(1) for stage in stages)


def _shortage(stage: StagePlan) -> str:
    place = stage.placement
    return f"on {place.host} {place.device} needs {stage.total_bytes / GIGA:.1f} GB of {stage.memory_bytes / GIGA:.1f} GB"
