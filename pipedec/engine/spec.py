"""What a pipeline is made of: models, layers, groups, dtype, device. Plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipedec.core import UserError
from pipedec.decoding import Drafter
from pipedec.drafting import DraftModel
from pipedec.model import BitaConfig, BitaWeights, Checkpoint, ModelConfig, StageModel, checked_bita
from pipedec.plan.emulation import Emulation
from pipedec.plan.layers import even_layers, explicit_layers
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.text.prompt import same_tokenizer
from pipedec.topology import Topology

REFERENCE_PAIR = Path(__file__).resolve().parent.parent / "reference_pair"
REFERENCE_THREADS = REFERENCE_PAIR.with_name("reference_threads")  # the same target and draft, trained to open threads
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
WINDOW_TIMESTEPS = 64
DISPATCHES = {"windows": WINDOW_TIMESTEPS, "tasks": 0}  # timesteps that the scheduler grants at once

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PipelineSpec:
    """One pipeline.

    Attributes:
        draft, bita: None if there is none.
        layers: for each stage, its first layer of the target and the layer behind its last.
        emulation: makes every rank's work take as long as on the devices that it names; None to run at full speed.
        dispatch: what the scheduler grants, ``windows`` of timesteps or single ``tasks``.
    """

    target: Path
    draft: Path | None
    topology: Topology
    layers: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    device: str = "auto"
    emulation: Emulation | None = None
    dispatch: str = "windows"
    bita: Path | None = None

    @classmethod
    def create(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        stages: int = 4,
        groups: int | None = None,
        layers: list[int] | None = None,
        dtype: str = "float32",
        device: str = "auto",
        dispatch: str = "windows",
        bita: str | Path | None = None,
    ) -> PipelineSpec:
        """Check the user's options and fill in the rest: the shipped pair, even layers, one stage per group.

        Args:
            draft: a checkpoint directory; ``"none"`` for no draft. None takes the shipped draft for the shipped target, and no
                draft for another target with a BiTA.
            layers: layers of each stage; they must add up to the target's.
            bita: a directory that ``pipedec train bita`` wrote; None for the shipped one with the shipped target; ``"none"``.

        Raises:
            UserError: one line that says what is wrong with the checkpoints or the numbers.
        """
        if dtype not in DTYPES:
            raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
        if device not in DEVICES:
            raise UserError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
        if dispatch not in DISPATCHES:
            raise UserError(f"unknown dispatch {dispatch!r}: choose one of {', '.join(DISPATCHES)}")
        target_path = Path(target) if target is not None else REFERENCE_PAIR / "target"
        shipped = REFERENCE_PAIR if target is None else None
        draft_path = _chosen(draft, shipped and shipped / "draft")
        bita_path = _chosen(bita, shipped and shipped / "bita")
        if draft is None and target is not None and bita_path is None:
            raise UserError("give --draft DIR beside --target (a small model with the same tokenizer), or --draft none")
        config = checked(target_path)
        if draft_path is not None:
            checked(draft_path)
            same_tokenizer(target_path, draft_path)
        if bita_path is not None:
            checked_bita(bita_path, target_path)
        topology = Topology.even(stages, stages if groups is None else groups)
        if layers is not None and len(layers) != stages:
            raise UserError(f"--layers lists {len(layers)} stages, but there are {stages}: give one number for each stage")
        parts = even_layers(config.num_layers, stages) if layers is None else explicit_layers(layers, config.num_layers)
        bounds = tuple((part.start, part.stop) for part in parts)
        return cls(target_path, draft_path, topology, bounds, dtype, device, dispatch=dispatch, bita=bita_path)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def window(self) -> int:
        """Timesteps that the scheduler grants at once; 0 for single tasks."""
        return DISPATCHES[self.dispatch]

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    def rank_device(self, rank: int, local_rank: int) -> torch.device:
        """The device of a rank of a cluster. Rank 0 without a draft computes nothing and uses the CPU.

        The stages of a host have consecutive local ranks, so each gets a GPU of its own if there are as many GPUs as stages, also
        when such a rank 0 is on the host.
        """
        return torch.device("cpu") if rank == 0 and self.draft is None else self.torch_device(local_rank)

    def torch_device(self, local_rank: int = 0) -> torch.device:
        """The device of a rank that computes (see ``chosen_device``)."""
        return chosen_device(self.device, local_rank)

    def description(self) -> dict[str, object]:
        """The pipeline as plain JSON values."""
        return {
            "target": str(self.target), "draft": str(self.draft) if self.draft else None,
            "groups": self.topology.groups, "layers": self.layers, "dtype": self.dtype, "device": self.device,
            "emulation": self.emulation.description() if self.emulation else None, "dispatch": self.dispatch,
            "bita": str(self.bita) if self.bita else None,
        }  # fmt: skip

    @classmethod
    def from_description(cls, raw: dict[str, Any]) -> PipelineSpec:
        return cls(
            target=Path(raw["target"]),
            draft=Path(raw["draft"]) if raw["draft"] else None,
            topology=Topology(tuple(tuple(group) for group in raw["groups"])),
            layers=tuple((first, last) for first, last in raw["layers"]),
            dtype=raw["dtype"],
            device=raw["device"],
            emulation=Emulation.from_description(raw["emulation"]) if raw["emulation"] else None,
            dispatch=raw["dispatch"],
            bita=Path(raw["bita"]) if raw["bita"] else None,
        )

    def trained_masks(self) -> int:
        """Masks of the target's BiTA; 0 if it has none."""
        return BitaConfig.from_directory(self.bita).num_masks if self.bita else 0

    def load_stage(self, rank: int, device: torch.device, progress: Progress | None = None) -> StageWorker:
        """The worker of stage ``rank`` (1..n), its weights read from the target's checkpoint."""
        config = ModelConfig.from_directory(self.target)
        layers = range(*self.layers[rank - 1])
        model = StageModel.load(self.target, layers, self.torch_dtype, device, config=config, progress=progress)
        if self.bita is not None:
            model.attach(BitaWeights.load(self.bita, config, layers, self.torch_dtype, device))
        if rank == self.topology.final_rank:
            return FinalStageWorker(model, config.eos_token_ids, device)
        return StageWorker(model, device)

    def load_drafter(self, device: torch.device, progress: Progress | None = None) -> Drafter | None:
        """The whole draft model; None if there is no draft."""
        if self.draft is None:
            return None
        config = ModelConfig.from_directory(self.draft)
        layers = range(config.num_layers)
        return DraftModel(StageModel.load(self.draft, layers, self.torch_dtype, device, config=config, progress=progress))


def _chosen(given: str | Path | None, shipped: Path | None) -> Path | None:
    """The given directory; ``shipped`` if none is given; None for ``"none"``."""
    if given is None:
        return shipped
    return None if str(given) == "none" else Path(given)


def chosen_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that ``name``, one of DEVICES, stands for; ``auto`` prefers CUDA.

    Raises:
        UserError: CUDA is requested but not available.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def checked(directory: Path) -> ModelConfig:
    """The config of a complete checkpoint.

    Raises:
        UserError: it is missing, damaged, of an unsupported family, or lacks tensors.
    """
    config = ModelConfig.from_directory(directory)
    Checkpoint(directory).check_complete(config)
    return config
