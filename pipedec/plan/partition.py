"""The plan of a partition: layers, memory and expected times of every stage.

Measures nothing and starts nothing: a stage is memory-bound or compute-bound by what is known of its device, a transfer takes the
link's latency plus its bytes by the bandwidth. On long links, more timesteps are in flight than there are groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from pipedec.config import AUTO, ClusterConfig, Settings
from pipedec.config.cluster import PLANNED_MODEL_LEN
from pipedec.config.settings import Cut
from pipedec.core.errors import UserError
from pipedec.core.limits import CAPTURED_ROWS, DRAFTED_ROWS, KNEE_ROWS, MAX_FORWARDS, MAX_PASSAGE
from pipedec.core.stage_message import ROW_ID_BYTES, Load
from pipedec.families import StateCounts, checkpoint_dtype, model_by_name
from pipedec.formats import ALL_PLAIN, DTYPE_BYTES, WeightFormat
from pipedec.hardware import DEVICES, GIGA, DeviceSpec, LinkSpec
from pipedec.methods import LayerTreeOptions
from pipedec.plan.costs import ModelCosts, RankTiming
from pipedec.plan.curves import expected_top1, timesteps_per_token
from pipedec.plan.dtypes import Arithmetic, check_quantize, draft_dtype, kept_formats, target_dtype
from pipedec.plan.kv_memory import CPU_BLOCK, CUDA_BLOCK, DEFAULT_BYTES, TREE_ROWS, KVBudget, RankBudget
from pipedec.plan.placement import Placement, balance, even_layers, explicit_layers, place_ranks
from pipedec.plan.roofline import ROW_OVERLAP, PassTime
from pipedec.plan.state_memory import counted_states, rows_in_flight
from pipedec.topology import Topology

_LEAST_GAIN = 0.05  # a passage longer than there are groups must gain so much, as it needs more memory


@dataclass(frozen=True)
class StagePlan:
    """The layers, memory and times of one rank. Rank 0 is the draft (group 0), stages are ranks 1..n.

    Attributes:
        group: the group G_i of the stage, from 1.
        weight_bytes, kv_bytes, workspace_bytes: the memory it takes; KV for all that the plan gives it, and at least for one
            request of the whole context and the rows of its tree.
        state_pool_bytes: memory of its recurrent layers' pools.
        memory_bytes: what ranks may take of the device's memory, or this rank's part of it.
        kv_token_bytes: one token in the KV caches of its layers.
        rows: of a timestep, as of the plan.
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
    state_pool_bytes: int = 0
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
        return self.fixed_bytes + self.kv_bytes

    @property
    def fixed_bytes(self) -> int:
        """The memory it takes beside keys and values."""
        return self.weight_bytes + self.state_pool_bytes + self.workspace_bytes

    @property
    def kv_room(self) -> int:
        """Bytes that are left for keys and values. A processor's memory is nominal: no more than the default counts."""
        left = max(0, self.memory_bytes - self.fixed_bytes)
        return left if DEVICES[self.placement.device].is_gpu else min(left, DEFAULT_BYTES)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.memory_bytes


@dataclass(frozen=True)
class Measured:
    """Measurements, for a plan with data sheets that say little. Times are those of a partition's ranks where links take none, as
    on one machine.

    Attributes:
        pass_ms: of one row through all stages, a token of ``pp``. The draft differs from its data sheet as they do.
        timestep_ms: of the default method, the least that it takes.
        timesteps_per_token: of the default method, with as many timesteps in flight as there are groups.
        row_overlap: of the experts of a mixture's rows (see ``ExpertReads``); 0 for rows that are routed independently.
    """

    pass_ms: float | None = None
    timestep_ms: float | None = None
    timesteps_per_token: float | None = None
    row_overlap: float = ROW_OVERLAP


@dataclass(frozen=True)
class Plan:
    """A partition with its expected times."""

    partition: str
    target: str
    weights: WeightFormat
    numbers: str  # the dtype, and the format of weights that are in fewer bits
    max_model_len: int
    rows: int  # per timestep (see ``ModelCosts.usual_rows``)
    draft: StagePlan | None  # rank 0; None without a draft model
    draft_costs: ModelCosts | None
    entry: LinkSpec  # from rank 0 to stage 1
    stages: tuple[StagePlan, ...]
    duplex: str
    passage: int  # timesteps from a row's entry to its verdict: the groups, and those in which it is on links
    kv: KVBudget
    states: StateCounts  # of the stages
    problems: tuple[str, ...]  # why the plan cannot run, in whole sentences; empty if it can
    listed_us: float | None = None  # as of ``Places``
    measured: Measured = Measured()

    @property
    def num_groups(self) -> int:
        return self.stages[-1].group

    @property
    def ring_us(self) -> float:
        """One-way latencies of all links around the ring."""
        return self.entry.latency_us + sum(stage.timing.link.latency_us for stage in self.stages)

    @property
    def shared_stage(self) -> int | None:
        """The stage on whose device rank 0 computes; None if it has one of its own."""
        return next((stage.rank for stage in self.stages if stage.shared), None)

    @property
    def knee(self) -> int:
        """Rows per timestep up to which the stages are bound by reading weights, so that a further row costs nothing. 1 with
        routed experts, of which each row reads its own.
        """
        return whole_rows(stage.timing.compute.knee_rows for stage in self.stages)

    @property
    def has_experts(self) -> bool:
        """Whether the rows of a timestep are routed to experts, so that each costs time."""
        return any(stage.timing.compute.experts for stage in self.stages)

    @property
    def room(self) -> int:
        """Rows that may enter at a timestep (see ``room_of``): as many as the default method sends, at most; with experts it
        sends as many as pay.
        """
        return room_of((DEVICES[stage.placement.device], stage.timing.compute) for stage in self.stages)

    @property
    def timestep_ms(self) -> float:
        """A timestep of ``rows`` rows, in which the draft has one forward (see ``_timestep_ms``)."""
        return self.timestep_with(self.rows)

    def timestep_with(self, rows: int) -> float:
        """As ``timestep_ms``, with so many rows."""
        return self._timestep_ms(Load(rows), self.draft.timing.compute_ms(Load(rows)) if self.draft else 0.0)

    def timestep_drafting(self, drafting_ms: float, rows: int | None = None) -> float:
        """A timestep with so many rows, by default as many as there is room for, in which the draft's forwards take so long."""
        return self._timestep_ms(Load(rows or self.room), max(drafting_ms, self.measured.timestep_ms or 0.0))

    @property
    def top1(self) -> float:
        """The share of tokens that are the draft's first choice, as drafts of its size have it; 0 without a draft."""
        if self.draft_costs is None:
            return 0.0
        return expected_top1(self.draft_costs.model.parameters / model_by_name(self.target).parameters)

    def default_method_ms(self, top1: float | None = None) -> float | None:
        """Time per output token of the default method with the plan's draft; None without one.

        ``top1``: the draft's measured accuracy, by default the expected one.
        """
        if self.draft is None or self.draft_costs is None:
            return None
        device = DEVICES[self.draft.placement.device]
        forward_ms = self.draft_costs.pass_time(device, self.draft.layers, True).ms(DRAFTED_ROWS)
        return self.speculating_ms(self.top1 if top1 is None else top1, forward_ms)

    def speculating_ms(self, top1: float, forward_ms: float) -> float:
        """Time per output token of the default method with a draft of this accuracy and so long a forward, and as many forwards
        per timestep as make a token fastest. With experts also as many rows, by an estimate of what a tree of so many loses.
        """
        more, rows = self._timesteps_more_than_estimated(top1, forward_ms), self._entering_rows
        return min(
            more * timesteps_per_token(top1, forwards, self.passage, tree) * self.timestep_drafting(forwards * forward_ms, tree)
            for forwards in range(1, MAX_FORWARDS + 1)
            for tree in rows
        )

    @property
    def _entering_rows(self) -> Sequence[int | None]:
        """Numbers of rows among which the default method's best is; None for as many as it likes, where a row costs nothing."""
        return [1 << power for power in range(self.room.bit_length())] if self.has_experts else [None]

    def _timesteps_more_than_estimated(self, top1: float, forward_ms: float) -> float:
        """The measured timesteps of a token, in which as many forwards fitted, by the estimated ones; 1 without a measurement."""
        if self.measured.timesteps_per_token is None:
            return 1.0
        full = replace(self, passage=self.num_groups)
        timestep_ms = self.measured.timestep_ms or full.timestep_drafting(0.0, self._entering_rows[0])
        fitted = MAX_FORWARDS if forward_ms == 0 else min(max(int(timestep_ms / forward_ms), 1), MAX_FORWARDS)
        return self.measured.timesteps_per_token / timesteps_per_token(top1, fitted, self.num_groups)

    def ttft_ms(self, prompt_tokens: int) -> float:
        """Time to first token in an empty pipeline. The prompt passes in chunks at the knee, one after the other; with experts,
        in chunks that fill the room.
        """
        chunk = min(self.room, prompt_tokens) if self.has_experts else self.knee
        return (self.passage + ceil(prompt_tokens / chunk) - 1) * self._timestep_ms(Load(chunk, prompt_tokens // 2))

    @property
    def tpot_ms(self) -> float:
        """Time per output token of plain decoding."""
        return self.pass_ms(Load(1))

    def pass_ms(self, load: Load) -> float:
        """One pass of this load around the ring."""
        stages = sum(stage.timing.compute_ms(load) + stage.timing.send_ms(load.rows) for stage in self.stages)
        return self.entry.transfer_ms(load.rows * ROW_ID_BYTES) + stages

    def _timestep_ms(self, load: Load, drafting_ms: float = 0.0) -> float:
        """A timestep in which every stage has this load, and the draft's forwards take so long. On a shared device the passes of
        both ranks add up.

        The slowest group, its own transfers included, or the draft; then the transfers of the slowest rank between groups (paper
        §3.1). With more timesteps in flight than groups, links overlap with all of these: what takes longest of the groups, the
        draft, and the bytes on a link. With full duplex, no less than its share of the way around the ring, where a passage is.
        """
        overlap = self.passage > self.num_groups and self.duplex == "full"
        group_ms, ring_ms = {0: drafting_ms}, self.entry.transfer_ms(load.rows * ROW_ID_BYTES)
        sent_ms = {0: ring_ms}  # between groups, by sender
        for stage, following in zip(self.stages, [*self.stages[1:], None], strict=True):
            transfer_ms, before_ms = stage.timing.send_ms(load.rows), group_ms.get(stage.group, 0.0)
            compute_ms = stage.timing.compute_ms(load)
            delay_ms = delay_by_sharing_ms(drafting_ms, before_ms, compute_ms) if stage.shared else 0.0
            ring_ms += compute_ms + delay_ms + transfer_ms
            group_ms[0] += delay_ms
            group_ms[stage.group] = before_ms + compute_ms + delay_ms
            if following is None or following.group != stage.group:
                sent_ms[stage.rank] = transfer_ms
            elif not overlap:
                group_ms[stage.group] += transfer_ms
        slowest_ms = max(group_ms.values())
        if overlap:
            occupied_ms = max(stage.timing.occupied_ms(load.rows) for stage in self.stages)
            return max(slowest_ms, occupied_ms, ring_ms / self.passage)
        timestep_ms = slowest_ms + slowest_transfers_ms(sent_ms, len(self.stages), self.duplex)
        return timestep_ms if self.duplex == "half" else max(timestep_ms, ring_ms / self.passage)


def whole_rows(of_stages: Iterable[float]) -> int:
    """The fewest rows of any stage, in whole rows, at least 1."""
    return max(1, floor(min(of_stages)))


def room_of(stages: Iterable[tuple[DeviceSpec, PassTime]]) -> int:
    """Rows that may enter at a timestep of stages on these devices: those that the slowest computes in about the time of one, or
    with experts fast (see ``PassTime.room_rows``).

    On a GPU this is the largest power of two up to these, since captured forwards have a power of two of rows and compute as
    many. The figures of a processor are nominal: ``KNEE_ROWS``.
    """
    rooms = []
    for device, time in stages:
        power_of_two = 1 << max(floor(time.room_rows), 1).bit_length() - 1
        rooms.append(min(CAPTURED_ROWS, power_of_two) if device.is_gpu else KNEE_ROWS)
    return min(rooms)


def plan(config: ClusterConfig, partition_name: str | None = None, measured: Measured = Measured()) -> Plan:
    """The plan of one partition of ``config``. Stages that do not fit are listed in ``problems``. UserError for mistakes."""
    name, _ = config.find_partition(partition_name)
    config = config.for_partition(name)
    made = _planned(config, config.settings.cut.num_groups, measured)
    passage = _passage(made, config.settings)
    return made if passage == made.passage else _planned(config, passage, measured)


def _passage(made: Plan, settings: Settings) -> int:
    """The passage as given, or by which the default method's tokens come fastest. With tasks or half duplex: the groups."""
    groups = made.num_groups
    if settings.cluster.passage != AUTO or settings.cluster.dispatch == "tasks" or made.duplex == "half":
        return settings.passage
    forward_ms = 0.0 if made.draft is None else made.draft.timing.compute_ms(Load(DRAFTED_ROWS))
    rows = 1 if made.has_experts else made.room
    shortest_ms = replace(made, passage=MAX_PASSAGE).timestep_drafting(0.0, rows)
    filled = ceil(made.pass_ms(Load(rows)) / shortest_ms)  # more do not make a timestep shorter
    paces = {
        passage: replace(made, passage=passage).speculating_ms(made.top1, forward_ms)
        for passage in (groups, *range(groups + 1, min(max(filled, groups + 1), MAX_PASSAGE) + 1))
    }
    best = min(paces, key=lambda passage: paces[passage])
    return best if paces[best] < (1 - _LEAST_GAIN) * paces[groups] else groups


def _planned(config: ClusterConfig, passage: int, measured: Measured) -> Plan:
    """The plan of the only partition with a passage of so many timesteps."""
    name, partition = config.find_partition()
    settings, cut = config.settings, config.settings.cut
    width = (settings.limits.tree or LayerTreeOptions()).width
    max_model_len = settings.limits.max_model_len or PLANNED_MODEL_LEN
    target = model_by_name(config.target)
    found = place_ranks(config, name, partition)
    draft_place, places = found.draft, found.stages
    weights, draft_weights = _weights(config, draft_place, places)
    check_quantize("quantize", weights.quantize, config.target, target)
    shares = settings.limits.prefix_cache and not target.depends_on_length
    utilization, formats = settings.limits.gpu_memory_utilization, kept_formats(settings.numbers.dequantize)
    costs = ModelCosts(target, weights, width, max_model_len, passage, utilization, formats, row_overlap=measured.row_overlap)
    kept = target.formats if formats is None else formats
    numbers = str(weights) if kept is ALL_PLAIN else f"{weights}, weights in {kept.title}"
    entry = config.network.link(found.host, places[0].host)
    draft = draft_costs = None
    if draft_place is not None:
        draft_costs = replace(costs, model=model_by_name(config.draft), weights=draft_weights)
        check_quantize("draft_quantize", draft_weights.quantize, config.draft, draft_costs.model)
        draft_layers = range(draft_costs.model.num_hidden_layers)
        draft_costs = _with_states(draft_costs, [draft_layers], settings, shares, TREE_ROWS * (settings.passage + 1))
        draft = _plan_rank(draft_costs, 0, draft_place, 0, draft_layers, entry, ROW_ID_BYTES, is_last=True)
    even = even_layers(target.num_hidden_layers, cut.stages)
    costs = _with_states(costs, even, settings, shares, rows_in_flight(0, settings.passage))
    layers, problems = _split(costs, cut, places, draft)
    room = room_of(_on_devices(costs, places, layers))
    costs = _with_states(costs, layers, settings, shares, rows_in_flight(room, settings.passage))
    topology, receivers = Topology.even(cut.stages, cut.num_groups), [*(place.host for place in places[1:]), found.host]
    is_rounded = settings.cluster.wire_dtype == "int8"  # to bytes and a scale for each row
    row_bytes = target.hidden_size + DTYPE_BYTES["float32"] if is_rounded else target.hidden_size * weights.element_bytes
    stages = tuple(
        _plan_rank(
            costs, rank, place, topology.group_of(rank) + 1, own, config.network.link(place.host, receiver),
            ROW_ID_BYTES + row_bytes if rank < cut.stages else 0, is_last=rank == cut.stages,
        )
        for rank, (place, receiver, own) in enumerate(zip(places, receivers, layers, strict=True), start=1)
    )  # fmt: skip
    draft, stages = _with_shares(draft, stages)
    if measured.pass_ms is not None:
        slower = measured.pass_ms / sum(stage.timing.compute_ms(Load(1)) for stage in stages)
        draft, stages = draft and _slowed(draft, slower), tuple(_slowed(stage, slower) for stage in stages)
    ranks = [*([draft] if draft else []), *stages]
    given, gpus = settings.limits.kv_cache_bytes, any(DEVICES[rank.placement.device].is_gpu for rank in ranks)
    budgets = [RankBudget(rank.rank, rank.kv_room if given is None else given, rank.kv_token_bytes) for rank in ranks]
    block = CUDA_BLOCK if gpus else CPU_BLOCK
    kv = KVBudget(budgets, max_model_len, settings.limits.max_num_seqs, passage, block)
    draft, stages = draft and _with_kv(draft, kv), tuple(_with_kv(stage, kv) for stage in stages)
    for stage in stages:
        if not stage.fits:
            smaller = ", bfloat16 or quantize" if weights.dtype == "float32" else " or quantize"
            smaller = smaller if weights.quantize is None and kept is ALL_PLAIN else ""
            problems.append(f"stage {stage.rank} {_shortage(stage)}: use more stages{smaller}")
    if draft and not draft.fits:
        problems.append(f"the draft {_shortage(draft)}: use a larger device or a smaller draft")
    try:
        kv.check(max_model_len, max(costs.rows, room_of((DEVICES[one.placement.device], one.timing.compute) for one in stages)))
    except UserError as error:
        problems = problems or [str(error)]
    return Plan(
        name, config.target, weights, numbers, max_model_len, costs.usual_rows, draft, draft_costs, entry, stages,
        config.network.duplex, passage, kv, costs.states, tuple(problems), found.listed_us, measured,
    )  # fmt: skip


def _on_devices(costs: ModelCosts, places: Sequence[Placement], layers: Sequence[range]) -> list[tuple[DeviceSpec, PassTime]]:
    """The device of each stage, and a pass through it."""
    devices = [DEVICES[place.device] for place in places]
    ends = [stage == len(places) for stage in range(1, len(places) + 1)]
    return [(device, costs.pass_time(device, own, last)) for device, own, last in zip(devices, layers, ends, strict=True)]


def _with_states(costs: ModelCosts, layers: Sequence[range], settings: Settings, shares: bool, rows: int) -> ModelCosts:
    """With as many states as the settings leave room for on ranks with these layers, and stashes for so many rows of trees."""
    limits, state_bytes = settings.limits, [costs.state_bytes(own) for own in layers]
    return replace(costs, states=counted_states(state_bytes, limits.state_memory_bytes, limits.max_num_seqs, shares, rows))


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
    layer_ms = [costs.layer_ms(device) for device in devices]
    rows = costs.usual_rows
    extra_ms = [costs.pass_time(device, range(0), last).ms(rows) for device, (_, last) in zip(devices, ends, strict=True)]
    taken = [0] * stages
    if draft and draft.placement in places:
        shared = places.index(draft.placement)
        extra_ms[shared] += draft.compute_ms
        taken[shared] = draft.total_bytes
    room = [costs.room(device.name, *end, used) for device, end, used in zip(devices, ends, taken, strict=True)]
    layer_bytes = costs.layer_bytes()
    try:
        return explicit_layers(balance(layer_ms, extra_ms, layer_bytes, room), num_layers), []
    except UserError as error:
        unlimited = balance(layer_ms, extra_ms, [0] * num_layers, [0] * stages)
        return explicit_layers(unlimited, num_layers), [str(error)]


def _plan_rank(
    costs: ModelCosts, rank: int, place: Placement, group: int, layers: range, link: LinkSpec, row_bytes: int, is_last: bool
) -> StagePlan:
    """Rank 0 with the whole draft, or a stage. ``row_bytes`` as of ``RankTiming``; ``is_last``: it has the head."""
    device = DEVICES[place.device]
    return StagePlan(
        rank, place, group, layers, costs.weight_bytes(layers, rank <= 1, is_last), costs.kv_bytes(layers),
        costs.workspace_bytes(device.name), costs.memory_bytes(device.name), costs.token_bytes(layers),
        RankTiming(costs.pass_time(device, layers, is_last), link, row_bytes), costs.usual_rows, costs.state_pool_bytes(layers),
    )  # fmt: skip


def _with_shares(draft: StagePlan | None, stages: tuple[StagePlan, ...]) -> tuple[StagePlan | None, tuple[StagePlan, ...]]:
    """Divide the memory of a device that the draft shares with a stage: what weights and activations of both leave is divided so
    that it holds the same tokens of either."""
    stage = next((stage for stage in stages if draft and stage.placement == draft.placement), None)
    if draft is None or stage is None:
        return draft, stages
    left = stage.memory_bytes - draft.fixed_bytes - stage.fixed_bytes
    token_bytes = draft.kv_token_bytes + stage.kv_token_bytes
    part = max(draft.fixed_bytes + left * draft.kv_token_bytes // max(token_bytes, 1), 0)
    shared = replace(stage, memory_bytes=stage.memory_bytes - part, shared=True)
    return replace(draft, memory_bytes=part, shared=True), tuple(shared if one is stage else one for one in stages)


def _with_kv(rank: StagePlan, kv: KVBudget) -> StagePlan:
    """With memory for all tokens of the budget, or for the least it needs."""
    return replace(rank, kv_bytes=max(rank.kv_bytes, kv.tokens * rank.kv_token_bytes))


def _slowed(rank: StagePlan, factor: float) -> StagePlan:
    return replace(rank, timing=replace(rank.timing, compute=rank.timing.compute.slowed(factor)))


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
