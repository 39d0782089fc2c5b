"""A pipeline that can be built: its settings, and what follows from them and from its checkpoints. The same on every rank.

Plain data that loads no torch, so that supervisors do not load it; ``engine.build`` resolves settings and loads models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedec.checkpoints import CheckpointPart, rank_parts
from pipedec.config import AUTO, NONE, ServerConfig, Settings
from pipedec.core.limits import KNEE_ROWS, MAX_PASSAGE
from pipedec.families import ModelConfig, model_config
from pipedec.formats import WeightFormat
from pipedec.hardware import DEVICES
from pipedec.messages.run import BitaDescription, RankDescription, RunDescription
from pipedec.plan.dtypes import GIVEN
from pipedec.plan.emulation import Emulation
from pipedec.plan.kv_memory import CPU_BLOCK, CUDA_BLOCK
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
        row_ms: as ``expected_ms``, of the stages' devices.
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
    row_ms: tuple[float, ...] = ()

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

    def config_of(self, rank: int) -> ModelConfig | None:
        """The model of a rank; None for a rank 0 without a draft."""
        path = self.target if rank else self.draft
        return None if path is None else model_config(path)

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
        return WeightFormat(self.dtype, self.settings.numbers.quantize, self.settings.numbers.kernels != "torch")

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
        """Messages that may be on their way over a link."""
        return MAX_PASSAGE // 2 if self.tunes_passage else self.settings.passage

    @property
    def knee(self) -> int:
        """Rows that may enter at a timestep: on the emulated devices, or on its own (see ``room_of``)."""
        return self.emulation.room if self.emulation else self.row_room

    @property
    def expected_ms(self) -> tuple[float, ...]:
        """Milliseconds of a timestep of 1, 2, … rows, on the emulated devices, or on its own; empty without routed experts."""
        return self.emulation.expected_ms if self.emulation else self.row_ms

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its answer."""
        most = self._target_config.context_length
        return min(self.settings.limits.max_model_len or most, most)

    @property
    def measures_memory(self) -> bool:
        """Whether ranks that are on GPUs find out when they start how much memory they have for keys and values."""
        return self._may_use_cuda and self.settings.limits.kv_cache_bytes is None and self.emulated_tokens is None

    @property
    def emulated_tokens(self) -> int | None:
        """Tokens for which the emulated devices have memory; None without an emulation, or without a limit."""
        return None if self.emulation is None else self.emulation.kv_tokens

    @property
    def kv_block(self) -> int:
        """Slots that are handed out together, on every rank the same: more where a rank may use CUDA, as its kernels need."""
        return CUDA_BLOCK if self._may_use_cuda else CPU_BLOCK

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests share the keys and values of equal prefixes. They differ where they depend on a prompt's length."""
        return self.settings.limits.prefix_cache and not self._target_config.depends_on_length

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

    @property
    def trained_masks(self) -> int:
        """Masks of the target's BiTA; 0 without one."""
        return self.trained_bita.num_masks if self.trained_bita else 0


def run_description(
    spec: PipelineSpec, ranks: Sequence[RankDescription] = (), digests: Mapping[str, str] | None = None
) -> RunDescription:
    """The description of the run of a pipeline that clients read."""
    preset = spec.emulation.preset if spec.emulation else None
    return RunDescription(
        spec.settings.without_secrets(), spec.topology.groups, spec.layers, preset, tuple(ranks), digests or {},
        spec.trained_bita, spec.agreed_slots or 0, model_config(spec.target).vocab_size,
    )  # fmt: skip


def _directory(model: str | None) -> Path | None:
    return None if model in (None, NONE) else Path(str(model))
