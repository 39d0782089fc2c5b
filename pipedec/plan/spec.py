"""A pipeline that can be built: its settings, and what follows from them and from its checkpoints. The same on every rank.

Plain data that loads no torch, so that supervisors do not load it; ``engine.build`` resolves settings and loads models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedec.checkpoints import CheckpointPart, rank_parts
from pipedec.checkpoints.formats import WeightFormat
from pipedec.config import AUTO, NONE, ServerConfig, Settings
from pipedec.core.limits import KNEE_ROWS, MAX_PASSAGE
from pipedec.families import ModelConfig, model_by_name, model_config
from pipedec.hardware import DEVICES
from pipedec.kv import KVManager
from pipedec.messages.run import BitaDescription, RankDescription, RunDescription
from pipedec.plan.costs import ModelCosts
from pipedec.plan.dtypes import GIVEN
from pipedec.plan.emulation import Emulation
from pipedec.plan.kv_memory import CPU_BLOCK, CUDA_BLOCK, DEFAULT_BYTES, KVBudget, RankBudget, RankNeeds
from pipedec.plan.placement import Placement
from pipedec.topology import Topology

DISPATCHES = {"windows": 64, "tasks": 0}  # timesteps that the scheduler grants at once


@dataclass(frozen=True)
class PipelineSpec:
    """One pipeline.

    Attributes:
        settings: completed: every model is a directory or ``none``, and the dtype of the target is never ``auto``. If the draft's
            is, rank 0 chooses by its processor when it loads the draft.
        layers: for each stage, its first layer of the target and the layer after its last.
        dtype_why, draft_dtype_why: why the target and the draft have their dtypes.
        num_gpus: GPUs of the machine on which the ranks run; of no meaning with ``places``.
        emulation: makes every rank's work take as long as on the devices that it names; None to run at full speed.
        places: the host and device of every rank, by the partition of a cluster.yaml; None if the supervisor decides.
        duplex: of the links between the ranks: ``half`` if a rank takes part in one transfer at a time, else ``full``.
        kv_room: for each rank, from 0, the bytes for keys and values that a cluster.yaml leaves; None without one.
        agreed_slots: of every rank's KV pool, once ranks on GPUs have measured their memory; None before, and where none does.
        row_room: rows that may enter at a timestep of the stages' devices (see ``room_of``).
    """

    settings: Settings
    layers: tuple[tuple[int, int], ...]
    dtype_why: str = GIVEN
    draft_dtype_why: str = GIVEN
    trained_bita: BitaDescription | None = None
    num_gpus: int = 0
    emulation: Emulation | None = None
    places: tuple[Placement, ...] | None = None
    servers: tuple[ServerConfig, ...] = ()
    duplex: str = "full"
    kv_room: tuple[int, ...] | None = None
    agreed_slots: int | None = None
    row_room: int = KNEE_ROWS

    def replaced(self, **values: Any) -> PipelineSpec:
        """With other settings by name, which are not checked."""
        return replace(self, settings=self.settings.replaced(**values))

    @property
    def target(self) -> Path:
        assert self.settings.models.target is not None
        return Path(self.settings.models.target)

    @property
    def draft(self) -> Path | None:
        return _directory(self.settings.models.draft)

    @property
    def bita(self) -> Path | None:
        return _directory(self.settings.models.bita)

    @property
    def models(self) -> dict[str, Path | None]:
        """The checkpoints by key; None for what the pipeline does without."""
        return {"target": self.target, "draft": self.draft, "bita": self.bita}

    def parts(self, rank: int) -> list[CheckpointPart]:
        """The parts of the checkpoints that a rank reads."""
        return rank_parts(rank, self.layers, self.models)

    @property
    def dtype(self) -> str:
        """Data type of the target, the same on every rank."""
        return self.settings.numbers.dtype

    @property
    def topology(self) -> Topology:
        return Topology.even(self.settings.cut.stages, self.settings.cut.num_groups)

    @property
    def weights(self) -> WeightFormat:
        """Weight format of the target."""
        return WeightFormat(self.dtype, self.settings.numbers.quantize)

    @property
    def largest_draft_weights(self) -> WeightFormat:
        """Weight format of the draft as every rank can compute it: float32, the largest, if rank 0 decides when it loads."""
        given = self.settings.numbers.draft_dtype
        return WeightFormat("float32" if given == AUTO else given, self.settings.numbers.draft_quantize)

    @property
    def window(self) -> int:
        """Timesteps that the scheduler grants at once; 0 for single tasks."""
        return DISPATCHES[self.settings.cluster.dispatch]

    @property
    def tunes_passage(self) -> bool:
        """Whether more timesteps than there are groups may be in flight, as many as pay."""
        duplex = self.duplex if self.emulation is None else self.emulation.duplex
        return self.settings.cluster.passage == AUTO and self.window > 0 and duplex == "full"

    @property
    def link_depth(self) -> int:
        """Envelopes that may be on their way over a link."""
        return MAX_PASSAGE // 2 if self.tunes_passage else self.settings.passage

    @property
    def knee(self) -> int:
        """Rows that a stage computes in about the time of one: on the emulated devices, or on its own."""
        return self.emulation.knee if self.emulation else self.row_room

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its answer."""
        most = self._target_config.context_length
        return min(self.settings.limits.max_model_len or most, most)

    @property
    def kv_slots(self) -> int:
        """Slots of every rank's KV pool: tokens for which every rank has memory, but no more than requests can use.

        An emulation has those of the devices that it emulates.
        """
        if self.agreed_slots is not None:
            return self.agreed_slots
        if self._emulated_tokens is not None:
            return self._emulated_tokens // self.kv_block * self.kv_block
        return self.kv_budget().tokens

    @property
    def measures_memory(self) -> bool:
        """Whether ranks that are on GPUs find out when they start how much memory they have for keys and values."""
        return self._may_use_cuda and self.settings.limits.kv_cache_bytes is None and self._emulated_tokens is None

    @property
    def _emulated_tokens(self) -> int | None:
        return None if self.emulation is None else self.emulation.kv_tokens

    @property
    def kv_block(self) -> int:
        """Slots that are handed out together, on every rank the same: more where a rank may use CUDA, as its kernels need."""
        return CUDA_BLOCK if self._may_use_cuda else CPU_BLOCK

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests share the keys and values of equal prefixes. They differ where they depend on a prompt's length."""
        return self.settings.limits.prefix_cache and not self._target_config.depends_on_length

    def kv_manager(self) -> KVManager:
        """The pipeline's KV cache manager, as rank 0 begins with it."""
        return KVManager(self.kv_slots, self.kv_block, self.shares_prefixes)

    def check_kv_budget(self) -> None:
        """Raises UserError if the KV budget holds no request of ``max_model_len``, or not even a few hundred tokens.

        Without a cluster.yaml it is unknown what will be measured.
        """
        if self.places is not None or not self.measures_memory:
            self.agreed_budget({})

    def agreed_budget(self, measured: Mapping[int, int]) -> KVBudget:
        """``kv_budget``. Raises UserError as ``check_kv_budget``."""
        budget = self.kv_budget(measured)
        budget.check(self.settings.limits.max_model_len, self.knee)
        return budget

    def kv_budget(self, measured: Mapping[int, int] | None = None) -> KVBudget:
        """The memory of every rank for keys and values: bytes as given by the user, else as ``measured`` (by rank) or planned."""
        limits, target = self.settings.limits, self._costs(1)
        token_bytes = {rank: (stop - start) * target.layer_token_bytes for rank, (start, stop) in enumerate(self.layers, start=1)}
        if self.draft is not None:
            draft = self._costs(0)
            token_bytes = {0: draft.model.num_hidden_layers * draft.layer_token_bytes, **token_bytes}
        ranks = []
        for rank, per_token in token_bytes.items():
            planned = DEFAULT_BYTES if self.kv_room is None else self.kv_room[rank]
            ranks.append(RankBudget(rank, limits.kv_cache_bytes or (measured or {}).get(rank, planned), per_token))
        return KVBudget(ranks, self.max_context, limits.max_num_seqs, self.settings.passage, self.kv_block)

    def needs(self, rank: int) -> RankNeeds:
        """Memory that a rank with a model allocates on a GPU. Weights are counted by their shapes, as in a plan."""
        costs = self._costs(rank)
        start, stop = (0, costs.model.num_hidden_layers) if rank == 0 else self.layers[rank - 1]
        token_bytes = (stop - start) * costs.layer_token_bytes
        held = costs.weight_bytes(stop - start, rank <= 1, rank in (0, len(self.layers)))
        beyond_the_slots = self.kv_block * token_bytes  # the pool also holds a learned prompt, and unused slots
        return RankNeeds(held + costs.rank_bytes + beyond_the_slots, token_bytes)

    def _costs(self, rank: int) -> ModelCosts:
        """The costs of the model of a rank."""
        path, weights = (self.draft, self.largest_draft_weights) if rank == 0 else (self.target, self.weights)
        max_model_len = self.settings.limits.max_model_len or 0
        return ModelCosts(model_by_name(str(path)), weights, self.knee, max_model_len, self.settings.passage)

    @property
    def _target_config(self) -> ModelConfig:
        return model_config(self.target)

    @property
    def _may_use_cuda(self) -> bool:
        if self.settings.cut.device != AUTO:
            return self.settings.cut.device == "cuda"
        if self.places is None:
            return self.num_gpus > 0
        return any(DEVICES[place.device].is_gpu for place in self.places)

    def description(self, ranks: Sequence[RankDescription] = (), digests: Mapping[str, str] | None = None) -> RunDescription:
        """The description of the run that clients read."""
        preset = self.emulation.preset if self.emulation else None
        return RunDescription(
            self.settings.without_secrets(), self.topology.groups, self.layers, preset, tuple(ranks), digests or {},
            self.trained_bita, self.agreed_slots or 0, self._target_config.vocab_size,
        )  # fmt: skip

    @property
    def trained_masks(self) -> int:
        """Masks of the target's BiTA; 0 without one."""
        return self.trained_bita.num_masks if self.trained_bita else 0


def _directory(model: str | None) -> Path | None:
    return None if model in (None, NONE) else Path(str(model))
