"""The plan of a partition: layers, memory and expected times of every stage.

Measures nothing and starts nothing: a stage is memory-bound or compute-bound by its device's data sheet, a transfer takes the
link's latency plus its bytes by the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from pipedec.config import ClusterConfig
from pipedec.config.cluster import PLANNED_MODEL_LEN
from pipedec.config.settings import Cut
from pipedec.core import KNEE_ROWS, ROW_ID_BYTES, Load, UserError
from pipedec.families import checkpoint_dtype, model_by_name
from pipedec.hardware import CAPTURED_ROWS, DEVICES, GIGA, LINKS, DeviceSpec, LinkSpec, PassTime, WeightFormat
from pipedec.methods import LayerTreeOptions
from pipedec.plan.costs import ModelCosts, RankTiming
from pipedec.plan.dtypes import Arithmetic, draft_dtype, target_dtype
from pipedec.plan.kv_memory import CPU_BLOCK, CUDA_BLOCK, DEFAULT_BYTES, KVBudget, RankBudget
from pipedec.plan.placement import Placement, balance, explicit_layers, place_stages
from pipedec.topology import Topology


@dataclass(frozen=True)
class StagePlan:
    """The layers, memory and times of one rank. Rank 0 is the draft (group 0), stages are ranks 1..n.

    Attributes:
        group: the group G_i of the stage, from 1.
        weight_bytes, kv_bytes, workspace_bytes: the memory it takes; KV for all that the plan gives it, and at least for one
            request of the whole context and the rows of its tree.
        memory_bytes: what ranks may take of the device's memory, or this rank's part of it.
        kv_token_bytes: one token in the KV caches of its layers.
        rows: of a full tree layer.
        shared: whether the draft and a stage share the device.
    """

    rank: int
    placement: Placement
    group: int
    layers: range
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    memory_bytes: int
    kv_token_bytes: int
    timing: RankTiming
    rows: int
    shared: bool = False

    @property
    def compute_ms(self) -> float:
        """One pass of ``rows`` rows through the stage, alone on its device."""
        return self.timing.compute_ms(Load(self.rows))

    @property
    def transfer_ms(self) -> float:
        """Sending its output: rows to the next rank, from the last stage the verdict to rank 0."""
        return self.timing.send_ms(self.rows)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def kv_room(self) -> int:
        """Bytes that are left for keys and values. A processor's memory is nominal: no more than the default counts."""
        left = max(0, self.memory_bytes - self.weight_bytes - self.workspace_bytes)
        return left if DEVICES[self.placement.device].is_gpu else min(left, DEFAULT_BYTES)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.memory_bytes


@dataclass(frozen=True)
class Plan:
    """A partition with its expected times."""

    partition: str
    target: str
    weights: WeightFormat
    max_model_len: int
    rows: int  # per timestep, the tree's width
    draft: StagePlan | None  # rank 0; None without a draft model
    draft_costs: ModelCosts | None
    stages: tuple[StagePlan, ...]
    duplex: str
    kv: KVBudget
    problems: tuple[str, ...]  # why the plan cannot run, in whole sentences; empty if it can

    @property
    def num_groups(self) -> int:
        return self.stages[-1].group

    @property
    def shared_stage(self) -> int | None:
        """The stage on whose device rank 0 computes; None if it has one of its own."""
        return next((stage.rank for stage in self.stages if stage.shared), None)

    @property
    def knee(self) -> int:
        """Rows per timestep up to which the stages are bound by reading weights, so that a further row costs nothing."""
        return knee_of(stage.timing for stage in self.stages)

    @property
    def room(self) -> int:
        """Rows that may enter at a timestep (see ``room_of``): as many as the default method sends, at most."""
        return room_of((DEVICES[stage.placement.device], stage.timing.compute) for stage in self.stages)

    @property
    def timestep_ms(self) -> float:
        """The slowest group (or the draft), then the transfers of the slowest rank between groups (paper §3.1). On a shared
        device the passes of both ranks add up."""
        return self.timestep_with(self.rows)

    def timestep_with(self, rows: int) -> float:
        """As ``timestep_ms``, with so many rows."""
        return _timestep_ms(self.draft, self.stages, self.duplex, Load(rows))

    def timestep_drafting(self, drafting_ms: float) -> float:
        """A timestep with as many rows as there is room for, in which the draft's forwards take so long."""
        return _timestep_ms(self.draft, self.stages, self.duplex, Load(self.room), drafting_ms)

    def ttft_ms(self, prompt_tokens: int, concurrent: int = 1) -> float:
        """Time to first token without a queue. The prompt passes in chunks, one after the other, which fill what the rows of the
        other ``concurrent`` - 1 requests, just as long and decoded plainly, leave of the knee, but at least an eighth of it."""
        decoding = ceil((concurrent - 1) / self.num_groups)
        chunk = max(self.knee - decoding, self.knee // 8, 1)
        past = prompt_tokens // 2 + decoding * prompt_tokens
        return (self.num_groups + ceil(prompt_tokens / chunk) - 1) * self._plain_ms(Load(chunk + decoding, past))

    def last_ttft_ms(self, prompt_tokens: int, concurrent: int) -> float:
        """Time to the last first token of ``concurrent`` requests that arrive together in an empty pipeline."""
        chunks = concurrent * prompt_tokens / self.knee
        return (self.num_groups + ceil(chunks) - 1) * self._plain_ms(Load(self.knee, prompt_tokens // 2))

    def tpot_ms(self, past: int, concurrent: int = 1) -> float:
        """Time per output token of plain decoding: one pass through all groups, among which ``concurrent`` requests with
        ``past`` tokens each are spread."""
        if concurrent == 1:
            return sum(stage.timing.compute_ms(Load(1, past)) + stage.timing.send_ms(1) for stage in self.stages)
        rows = ceil(concurrent / self.num_groups)
        return self.num_groups * self._plain_ms(Load(rows, rows * past))

    def _plain_ms(self, load: Load) -> float:
        """A timestep in which every stage has this load, and nothing is drafted."""
        return _timestep_ms(None, self.stages, self.duplex, load)


def knee_of(stages: Iterable[RankTiming]) -> int:
    """The smallest of the stages' knees, in whole rows, at least 1."""
    return max(1, floor(min(stage.compute.knee_rows for stage in stages)))


def room_of(stages: Iterable[tuple[DeviceSpec, PassTime]]) -> int:
    """Rows that may enter at a timestep of stages on these devices: those that the slowest computes in about the time of one.

    On a GPU this is the largest power of two up to the knee, since captured forwards have a power of two of rows and compute as
    many. The figures of a processor are nominal: ``KNEE_ROWS``.
    """
    rooms = []
    for device, time in stages:
        power_of_two = 1 << max(floor(time.knee_rows), 1).bit_length() - 1
        rooms.append(min(CAPTURED_ROWS, power_of_two) if device.is_gpu else KNEE_ROWS)
    return min(rooms)


def plan(config: ClusterConfig, partition_name: str | None = None) -> Plan:
    """The plan of one partition of ``config``. Stages that do not fit are listed in ``problems``. UserError for mistakes."""
    name, partition = config.find_partition(partition_name)
    config = config.for_partition(name)
    settings, cut = config.settings, config.settings.cut
    width = (settings.limits.tree or LayerTreeOptions()).width
    max_model_len = settings.limits.max_model_len or PLANNED_MODEL_LEN
    target = model_by_name(config.target)
    draft_place, places = place_stages(config, name, partition)
    weights, draft_weights = _weights(config, draft_place, places)
    costs = ModelCosts(target, weights, width, max_model_len, cut.num_groups, settings.limits.gpu_memory_utilization)
    draft = draft_costs = None
    if draft_place is not None:
        draft_costs = replace(costs, model=model_by_name(config.draft), weights=draft_weights)
        draft_layers, link = range(draft_costs.model.num_hidden_layers), _link(config, draft_place, places[0])
        draft = _plan_rank(draft_costs, 0, draft_place, 0, draft_layers, link, ROW_ID_BYTES, is_last=True)
    layers, problems = _split(costs, cut, places, draft)
    topology, back = Topology.even(cut.stages, cut.num_groups), draft_place if draft_place in places else None
    row_bytes = ROW_ID_BYTES + target.hidden_size * weights.element_bytes
    stages = tuple(
        _plan_rank(
            costs, rank, place, topology.group_of(rank) + 1, own, _link(config, place, following),
            row_bytes if rank < cut.stages else 0, is_last=rank == cut.stages,
        )
        for rank, (place, following, own) in enumerate(zip(places, [*places[1:], back], layers, strict=True), start=1)
    )  # fmt: skip
    draft, stages = _with_shares(draft, stages)
    ranks = [*([draft] if draft else []), *stages]
    given, gpus = settings.limits.kv_cache_bytes, any(DEVICES[rank.placement.device].is_gpu for rank in ranks)
    budgets = [RankBudget(rank.rank, rank.kv_room if given is None else given, rank.kv_token_bytes) for rank in ranks]
    block = CUDA_BLOCK if gpus else CPU_BLOCK
    kv = KVBudget(budgets, max_model_len, settings.limits.max_num_seqs, cut.num_groups, block)
    draft, stages = draft and _with_kv(draft, kv), tuple(_with_kv(stage, kv) for stage in stages)
    for stage in stages:
        if not stage.fits:
            smaller = ", bfloat16 or quantize" if weights.dtype == "float32" else " or quantize"
            smaller = "" if weights.quantize is not None else smaller
            problems.append(f"stage {stage.rank} {_shortage(stage)}: use more stages{smaller}")
    if draft and not draft.fits:
        problems.append(f"the draft {_shortage(draft)}: use a larger device or a smaller draft")
    try:
        kv.check(max_model_len, max(costs.rows, room_of((DEVICES[one.placement.device], one.timing.compute) for one in stages)))
    except UserError as error:
        problems = problems or [str(error)]
    duplex = config.network.duplex
    return Plan(
        name, config.target, weights, max_model_len, width, draft, draft_costs, stages, duplex, kv, tuple(problems)
    )  # fmt: skip


def _weights(config: ClusterConfig, draft: Placement | None, stages: Sequence[Placement]) -> tuple[WeightFormat, WeightFormat]:
    """Formats of target and draft. The draft's processor is unknown here: ``auto`` counts as float32, its largest."""
    numbers = config.settings.numbers
    stage_arithmetics = [Arithmetic.planned(stage.device) for stage in stages]
    target = target_dtype(numbers.dtype, checkpoint_dtype(config.target), stage_arithmetics).name
    drafting = draft_dtype(numbers.draft_dtype, target, Arithmetic.planned(draft.device if draft else "cpu")).name
    return WeightFormat(target, numbers.quantize), WeightFormat(drafting, numbers.draft_quantize)


def _split(costs: ModelCosts, cut: Cut, places: Sequence[Placement], draft: StagePlan | None) -> tuple[list[range], list[str]]:
    """The layers of each stage, and problems: if they fit nowhere, they are balanced without regard to memory.

    A stage that shares its device with the draft has what the draft leaves of its memory and of its time.
    """
    num_layers, stages = costs.model.num_hidden_layers, cut.stages
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    if isinstance(cut.layers, tuple):
        return explicit_layers(cut.layers, num_layers), []
    ends = [(stage == 0, stage == stages - 1) for stage in range(stages)]
    devices = [DEVICES[place.device] for place in places]
    layer_ms = [costs.pass_time(device, 1, False).ms(costs.rows) for device in devices]
    extra_ms = [costs.pass_time(device, 0, last).ms(costs.rows) for device, (_, last) in zip(devices, ends, strict=True)]
    taken = [0] * stages
    if draft and draft.placement in places:
        shared = places.index(draft.placement)
        extra_ms[shared] += draft.compute_ms
        taken[shared] = draft.total_bytes
    room = [costs.room(device.name, *end, used) for device, end, used in zip(devices, ends, taken, strict=True)]
    try:
        return explicit_layers(balance(num_layers, layer_ms, extra_ms, room), num_layers), []
    except UserError as error:
        unlimited = balance(num_layers, layer_ms, extra_ms, [num_layers] * stages)
        return explicit_layers(unlimited, num_layers), [str(error)]


def _plan_rank(
    costs: ModelCosts, rank: int, place: Placement, group: int, layers: range, link: LinkSpec, row_bytes: int, is_last: bool
) -> StagePlan:
    """Rank 0 with the whole draft, or a stage. ``row_bytes`` as of ``RankTiming``; ``is_last``: it has the head."""
    count, device = len(layers), DEVICES[place.device]
    return StagePlan(
        rank, place, group, layers, costs.weight_bytes(count, rank <= 1, is_last), count * costs.layer_kv_bytes,
        costs.workspace_bytes(device.name), costs.memory_bytes(device.name), count * costs.layer_token_bytes,
        RankTiming(costs.pass_time(device, count, is_last), link, row_bytes), costs.rows,
    )  # fmt: skip


def _with_shares(draft: StagePlan | None, stages: tuple[StagePlan, ...]) -> tuple[StagePlan | None, tuple[StagePlan, ...]]:
    """Divide the memory of a device that the draft shares with a stage: what weights and activations of both leave is divided so
    that it holds the same tokens of either."""
    stage = next((stage for stage in stages if draft and stage.placement == draft.placement), None)
    if draft is None or stage is None:
        return draft, stages
    fixed = draft.weight_bytes + draft.workspace_bytes
    left = stage.memory_bytes - fixed - stage.weight_bytes - stage.workspace_bytes
    part = fixed + left * draft.kv_token_bytes // (draft.kv_token_bytes + stage.kv_token_bytes)
    shared = replace(stage, memory_bytes=stage.memory_bytes - part, shared=True)
    return replace(draft, memory_bytes=part, shared=True), tuple(shared if one is stage else one for one in stages)


def _with_kv(rank: StagePlan, kv: KVBudget) -> StagePlan:
    """With memory for all tokens of the budget, or for the least it needs."""
    return replace(rank, kv_bytes=max(rank.kv_bytes, kv.tokens * rank.kv_token_bytes))


def _link(config: ClusterConfig, source: Placement, target: Placement | None) -> LinkSpec:
    """The link between two devices; ``target`` None is rank 0 on a device of its own, taken to be on another server."""
    if target is not None and source.host == target.host:
        return LINKS[config.network.within_server]
    return LinkSpec(
        "between servers", config.network.latency_us, config.network.bandwidth_gbps / 8, "network: of the configuration"
    )


def _timestep_ms(
    draft: StagePlan | None, stages: Sequence[StagePlan], duplex: str, load: Load, drafting_ms: float | None = None
) -> float:
    """Slowest group, its own transfers included, or the draft; then the transfers of the slowest rank between groups.

    ``drafting_ms``: of the draft's forwards, by default of a single one.
    """
    if drafting_ms is None:
        drafting_ms = draft.timing.compute_ms(load) if draft else 0.0
    group_ms: dict[int, float] = {0: drafting_ms}
    sent_ms = {0: draft.timing.send_ms(load.rows)} if draft else {}  # between groups, by sender
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        inside = following is not None and following.group == stage.group
        transfer_ms, before_ms = stage.timing.send_ms(load.rows), group_ms.get(stage.group, 0.0)
        compute_ms = stage.timing.compute_ms(load)
        delay_ms = delay_by_sharing_ms(drafting_ms, before_ms, compute_ms) if stage.shared else 0.0
        group_ms[0] += delay_ms
        group_ms[stage.group] = before_ms + compute_ms + delay_ms + (transfer_ms if inside else 0.0)
        if not inside:
            sent_ms[stage.rank] = transfer_ms
    return max(group_ms.values()) + slowest_transfers_ms(sent_ms, len(stages), duplex)


def delay_by_sharing_ms(drafting_ms: float, before_ms: float, stage_ms: float) -> float:
    """How much longer rank 0's forwards and the pass of a stage take each because they share a device: while both compute, it
    gives either half of its time. ``before_ms``: from the beginning of the forwards to that of the pass.
    """
    return min(stage_ms, max(0.0, drafting_ms - before_ms))


def slowest_transfers_ms(sent_ms: Mapping[int, float], num_stages: int, duplex: str) -> float:
    """How long the transfers of a timestep take, of which every rank sends at most one, to the next rank (the last: to rank 0).

    With ``half`` duplex a rank's sending and receiving add up (Algorithm 2), with ``full`` they overlap.
    """
    if duplex == "full":
        return max(sent_ms.values(), default=0.0)
    ranks = range(num_stages + 1)
    return max(sent_ms.get(rank, 0.0) + sent_ms.get(rank - 1 if rank else num_stages, 0.0) for rank in ranks)


def _shortage(stage: StagePlan) -> str:
    place = stage.placement
    part = "its part, " if stage.shared else ""
    return f"on {place.host} {place.device} needs {stage.total_bytes / GIGA:.1f} GB of {part}{stage.memory_bytes / GIGA:.1f} GB"
